"""Chrome trace JSON, for ui.perfetto.dev and chrome://tracing: processes are ranks, threads are rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from asynccoll.trace.spans import Span, stack

#: How a file begins, to recognize it as ours: other programs write such files, too.
_MADE_BY = {"otherData": {"made by": "asynccoll"}}
#: A rank, the number of ranks, what its times count from, how long it was recorded, and its spans.
Recorded = tuple[int, int, float, float, Sequence[Span]]


def write_events(path: Path, recorded: Iterable[Recorded]) -> Path:
    """Write the events of all ranks to ``path``."""
    events = [event for one in recorded for event in _events(*one)]
    path.write_text(json.dumps({**_MADE_BY, "traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def are_events(path: Path) -> bool:
    """Whether ``write_events`` has written this file."""
    begins = json.dumps(_MADE_BY).removesuffix("}").encode()
    with path.open("rb") as file:
        return file.read(len(begins)) == begins


def _events(
    rank: int, world_size: int, began: float, seconds: float, spans: Sequence[Span]
) -> Iterable[dict[str, object]]:
    yield _about("process_name", rank, 0, f"rank {rank} of {world_size}")
    tracks = [
        (_named(row, number, track), track)
        for row, stacked in stack(spans)
        for number, track in enumerate(stacked, start=1)
    ]
    for tid, (name, track) in enumerate(tracks, start=1):
        yield _about("thread_name", rank, tid, name)
        for span in track:
            yield _event(span, rank, tid, began, seconds)


def _named(row: str, number: int, track: Sequence[Span]) -> str:
    """Return a track's name: its thread or lane, with its number if it is not the first track of its row."""
    return f"{'lane ' * track[0].is_operation}{row}{f' ({number})' * (number > 1)}"


def _event(span: Span, rank: int, tid: int, began: float, seconds: float) -> dict[str, object]:
    end = seconds if span.end is None else span.end
    event: dict[str, object] = {
        "name": span.name,
        "cat": "operation" if span.is_operation else "compute",
        "ph": "X",
        "ts": (began + span.start) * 1e6,
        "dur": max(0.0, end - span.start) * 1e6,
        "pid": rank,
        "tid": tid,
    }
    if span.is_operation:
        event["args"] = {
            "bytes": span.size_bytes,
            "sequence": span.sequence,
            "place": span.place,
            "in_flight": span.end is None,
        }
    elif span.place:
        event["args"] = {"of": span.place}
    return event


def _about(what: str, rank: int, tid: int, name: str) -> dict[str, object]:
    """Return a Chrome metadata event, which names a process or a thread."""
    return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}

"""A timeline of what ran when: operations on their lanes, and the spans of compute you mark.

    with ac.trace.recording() as timeline:
        with timeline.span("backward"):
            loss.backward()
        await gradients
    timeline.plot(f"timeline-{ac.get_rank()}.png")          # a picture; needs matplotlib
    timeline.to_chrome(f"timeline-{ac.get_rank()}.json")    # for ui.perfetto.dev or chrome://tracing

An operation is recorded from the moment it is accepted to the moment it is done, stamped by the
completing thread. Nothing is recorded, and nothing but one look at an empty tuple paid, outside of
``recording()``. Times are the host's: on a device that orders operations by stream (nccl) an operation
is done when it is enqueued, so look at those with ``torch.profiler``.

Data flows one way: lane -> context.observers -> Timeline -> file. How a picture looks is in
``plot``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynccoll import host
from asynccoll.runtime.process import current
from asynccoll.trace.spans import Span, covered, intersection, length, stack

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation
    from asynccoll.world.context import Context

__all__ = ["Timeline", "follow", "recording"]


class _Entry:
    """A span while it grows: what is known at its start, and its end once there is one."""

    __slots__ = ("end", "name", "operation", "place", "row", "sequence", "size_bytes", "start")

    def __init__(self, name: str, row: str, start: float, *, operation: bool = False) -> None:
        self.name = name
        self.row = row
        self.start = start
        self.end: float | None = None
        self.operation = operation
        self.size_bytes = 0
        self.sequence = 0
        self.place = ""

    def finish(self) -> None:
        if self.end is None:
            self.end = host.monotonic()

    def span(self, origin: float) -> Span:
        end = None if self.end is None else self.end - origin
        return Span(
            self.name,
            self.row,
            self.start - origin,
            end,
            self.operation,
            self.size_bytes,
            self.sequence,
            self.place,
        )


class Timeline:
    """What one rank did while it was recorded. Made by ``recording()``; any thread may add to it."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._began = host.monotonic()
        self._ended: float | None = None
        self._entries: list[_Entry] = []

    def __repr__(self) -> str:
        return f"<Timeline of rank {self.rank}: {len(self._entries)} spans in {self.seconds:.3f} s>"

    @contextmanager
    def span(self, name: str, *, row: str | None = None) -> Iterator[None]:
        """A block of compute called ``name``: ``with timeline.span("backward"):``.

        It appears in the row of the calling thread, or in ``row``. Leave out blocks that only wait:
        what lies under no span is what ``hidden_fraction`` counts as waited for.
        """
        entry = _Entry(name, row or host.current_thread().name, host.monotonic())
        self._entries.append(entry)
        try:
            yield
        finally:
            entry.finish()

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything recorded so far, by start."""
        found = (entry.span(self._began) for entry in list(self._entries))
        return tuple(sorted(found, key=lambda span: span.start))

    @property
    def seconds(self) -> float:
        """How long the recording lasted, or has lasted so far."""
        return (self._ended or host.monotonic()) - self._began

    def hidden_fraction(self) -> float:
        """The share of the time with an operation in flight during which this rank computed.

        1.0 is communication that costs nothing, 0.0 communication that is waited for; ``nan`` without
        any. As much a matter of what you mark with ``span`` as of what is hidden.
        """
        busy = covered(self._clipped(operations=True))
        hidden = intersection(busy, covered(self._clipped(operations=False)))
        return length(hidden) / total if (total := length(busy)) else float("nan")

    def _clipped(self, *, operations: bool) -> list[tuple[float, float]]:
        last = self.seconds
        return [
            (span.start, min(last, last if span.end is None else span.end))
            for span in self.spans
            if span.is_operation is operations
        ]

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Draw the timeline into ``path`` (``.png``, ``.svg`` or ``.pdf``); the path.

        Rows of compute above, one per thread; rows of communication below, one per lane, with what is
        hidden behind compute set off from what is waited for.

        Raises:
            BackendNotFoundError: matplotlib is missing; the text has the line that installs it.
        """
        from asynccoll.trace.plot import draw

        return draw(self, Path(path), title)

    def to_chrome(self, path: str | os.PathLike[str]) -> Path:
        """Write Chrome trace JSON for ``ui.perfetto.dev`` or ``chrome://tracing``; the path.

        Files of ranks on one host share a clock, so they line up when opened together.
        """
        target = Path(path)
        document = {"traceEvents": self._events(), "displayTimeUnit": "ms"}
        target.write_text(json.dumps(document))
        return target

    def _events(self) -> list[dict[str, Any]]:
        name = f"rank {self.rank} of {self.world_size}"
        events = [_about("process_name", self.rank, 0, name)]
        tracks = [(row, track) for row, stacked in stack(self.spans) for track in stacked]
        for tid, (row, track) in enumerate(tracks, start=1):
            events.append(_about("thread_name", self.rank, tid, row))
            events.extend(self._event(span, tid) for span in track)
        return events

    def _event(self, span: Span, tid: int) -> dict[str, Any]:
        end = self.seconds if span.end is None else span.end
        event: dict[str, Any] = {
            "name": span.name,
            "cat": "operation" if span.is_operation else "compute",
            "ph": "X",
            "ts": (self._began + span.start) * 1e6,
            "dur": max(0.0, end - span.start) * 1e6,
            "pid": self.rank,
            "tid": tid,
        }
        if span.is_operation:
            event["args"] = {
                "bytes": span.size_bytes,
                "sequence": span.sequence,
                "place": span.place,
                "in_flight": span.end is None,
            }
        return event

    def _observe(self, operation: Operation, size_bytes: int) -> None:
        """A lane has accepted ``operation``."""
        entry = _Entry(operation.name, _row(operation), operation.started, operation=True)
        entry.size_bytes = size_bytes
        entry.sequence = operation.sequence
        entry.place = str(operation.place)
        self._entries.append(entry)
        operation.add_waker(entry.finish)

    def _end(self) -> None:
        self._ended = host.monotonic()


@contextmanager
def recording() -> Iterator[Timeline]:
    """Record every operation of this rank, and the spans you mark, while the block runs.

    Recordings may nest and overlap. What is in flight at the end stays open until it is done.

    Raises:
        NotInitializedError: under a launcher, before ``ac.initialize()``.
    """
    context = current()
    timeline = Timeline(context.rank, context.world_size)
    end = follow(timeline, context)
    try:
        yield timeline
    finally:
        end()


def follow(timeline: Timeline, context: Context) -> Callable[[], None]:
    """Have ``timeline`` told of every operation of ``context``, until what comes back is called."""
    observe = timeline._observe  # one object: a bound method is made anew each time
    context.observers = (*context.observers, observe)

    def end() -> None:
        context.observers = tuple(one for one in context.observers if one is not observe)
        timeline._end()

    return end


def _row(operation: Operation) -> str:
    group = operation.lane.group
    where = "" if group.is_world else f" of {list(group.ranks)}"
    return f"{operation.lane.name}{where}"


def _about(what: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    """A Chrome metadata event, which names a process or a thread."""
    return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}


# Intervals and tracks

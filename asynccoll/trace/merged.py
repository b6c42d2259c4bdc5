"""The parts of all ranks on one clock, and the files that are made from them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check, fitting
from asynccoll.ops.collectives import gather_object
from asynccoll.runtime.process import current
from asynccoll.trace import findings
from asynccoll.trace.clocks import align
from asynccoll.trace.page import write_page
from asynccoll.trace.parts import Part, part_of, read_part
from asynccoll.trace.perfetto import write_events
from asynccoll.trace.spooling import recordings
from asynccoll.trace.timeline import Timeline
from asynccoll.waiting.work import Work


class Trace:
    """What every rank did, with times on one clock, in seconds since the first recorded span.

    ``parts`` are those of the ranks, in order. ``uncertain``: by how many seconds times of different nodes
    may be off; 0 if all ranks read one clock, None if only the nodes' wall clocks could be compared.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        ordered = sorted(parts, key=lambda part: part.rank)
        alignment = align([part.as_clock() for part in ordered])
        begins = [part.began + offset for part, offset in zip(ordered, alignment.offsets, strict=True)]
        origin = min(map(_first, ordered, begins), default=0.0)
        self.parts: tuple[Part, ...] = tuple(
            part.shifted(begin - origin) for part, begin in zip(ordered, begins, strict=True)
        )
        self.uncertain: float | None = alignment.uncertain
        self.findings: findings.Findings = findings.find(self.parts)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.parts)} ranks, {self.findings.seconds:.3f} s>"

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: the lanes of all ranks, and the findings; returns the path."""
        return write_page(Path(path), self.parts, self.findings, self.uncertain)

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write Chrome trace JSON of all ranks for ``ui.perfetto.dev``; returns the path."""
        recorded = [(part.rank, part.world_size, 0.0, part.seconds, part.spans) for part in self.parts]
        return write_events(Path(path), recorded)

    def to_dict(self) -> dict[str, object]:
        """Return the findings as a dict, for programs."""
        return {"clock_uncertain_seconds": self.uncertain, **self.findings.to_dict()}


def _first(part: Part, began: float) -> float:
    """Return when the first span began on a rank whose recording began at ``began``."""
    return began + min((span.start for span in part.spans), default=0.0)


@fitting
def gather(timeline: Timeline, *, dst: int = 0) -> Work[Trace | None]:
    """Return the trace of all ranks on ``dst``, None elsewhere. Every rank calls it, after the recording.

    >>> trace = await ac.trace.gather(timeline)
    >>> if trace is not None:
    ...     trace.to_html("trace.html")
    """
    check("the timeline", timeline, Timeline, "what ac.trace.recording() gives")
    part = part_of(timeline.recorder, current())
    return gather_object(part, dst=dst).map(lambda parts: None if parts is None else Trace(parts))


@fitting
def load(where: str | os.PathLike[str]) -> Trace:
    """Load the trace from a directory that ranks wrote to (``ASYNCCOLL_TRACE``, ``asynccoll trace run``).

    Raises:
        InvalidArgumentError: there is none.
    """
    check("where", where, (str, os.PathLike), "the path of a directory")
    files = recordings(Path(where))
    if not files:
        raise InvalidArgumentError(
            f"there is no recording in {str(where)!r}: expected files rank-*.jsonl, left there by ranks "
            "that call ac.initialize() under `asynccoll trace run`, or with ASYNCCOLL_TRACE set to it"
        )
    return Trace(map(read_part, files))

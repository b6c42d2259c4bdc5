"""What one rank recorded, as a value and as a file that can be read whatever happened to the rank.

A file consists of lines of JSON: a description of the rank, then each span once it is over (and, at
intervals, those that are not), and each end of a step once. If a rank was killed, only the last half second
is missing, and the line that says that the file is complete.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from asynccoll import host
from asynccoll.environment.nodes import node_name
from asynccoll.errors import InvalidArgumentError
from asynccoll.trace.clocks import SYNCHRONIZING, Clock
from asynccoll.trace.recorder import Recorder, steps_of
from asynccoll.trace.spans import Span
from asynccoll.world.context import Context

_FORMAT = 1
#: The end of an operation's row if its group is not the world (``recorder.row_of``); lanes have any names.
_OF_RANKS = re.compile(r" of \[(\d+(?:, \d+)*)\]$")


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a trace. Times of spans and steps are seconds since ``began`` on its own clock."""

    rank: int
    world_size: int
    host: str
    pid: int
    #: the name of the clock that it reads; ranks on one node share it
    clock: str
    began: float
    #: the wall clock time when the rank's clock was 0
    wall: float
    backend: str
    #: whether an operation that is over here has begun everywhere: not on devices that run asynchronously
    ends_together: bool
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    steps: tuple[float, ...] = ()
    #: whether the recording is complete: a rank that was killed has not written what it did last
    is_whole: bool = True

    def end_of(self, span: Span) -> float:
        """Return the end of ``span``, or that of the recording if it has none."""
        return self.seconds if span.end is None else span.end

    def as_clock(self) -> Clock:
        """Return the rank's clock, to align it with those of other ranks."""
        operations: dict[Hashable, tuple[float, float]] = {
            span.key: (self.began + span.start, self.began + (span.end or 0.0))
            for span in self.spans
            if self.ends_together and span.key and _tells(span)
        }
        return Clock(self.clock, self.wall, operations)

    def shifted(self, by: float) -> Part:
        """Return a copy with all times later by that much, counted from ``began`` as before."""
        moved = [
            replace(span, start=span.start + by, end=None if span.end is None else span.end + by)
            for span in self.spans
        ]
        steps = tuple(step + by for step in self.steps)
        return replace(self, seconds=self.seconds + by, spans=tuple(moved), steps=steps)


def _tells(span: Span) -> bool:
    """Whether its end shows that it has begun everywhere. An empty payload need not be sent."""
    ended = span.end is not None and not span.failed
    return ended and span.name in SYNCHRONIZING and (span.size_bytes > 0 or span.name == "barrier")


def calls(parts: Iterable[Part]) -> dict[Hashable, list[tuple[Part, Span]]]:
    """Return the ranks' calls by operation, without messages."""
    found: dict[Hashable, list[tuple[Part, Span]]] = {}
    for part in parts:
        for span in part.spans:
            if span.key is not None:
                found.setdefault(span.key, []).append((part, span))
    return found


def members(span: Span, parts: Iterable[Part]) -> set[int]:
    """Return the ranks of the operation's group, which its row names if it is not the world."""
    ranks = _OF_RANKS.search(span.row)
    return {part.rank for part in parts} if ranks is None else set(map(int, ranks[1].split(", ")))


def part_of(recorder: Recorder, context: Context) -> Part:
    """Return what ``recorder`` has recorded so far in ``context``."""
    whose = describe(recorder, context)
    return replace(whose, seconds=recorder.seconds, spans=recorder.spans, steps=recorder.steps)


def describe(recorder: Recorder, context: Context) -> Part:
    """Describe the rank of ``context``, without what was recorded."""
    now = datetime.now(timezone.utc).timestamp()
    return Part(
        rank=context.rank,
        world_size=context.world_size,
        host=host.gethostname(),
        pid=host.getpid(),
        clock=node_name(),
        began=recorder.began,
        wall=now - host.monotonic(),
        backend=context.backend.name,
        ends_together=context.device.type == "cpu",
    )


_FIELDS = tuple(field.name for field in fields(Span))
_ABOUT = ("rank", "world_size", "host", "pid", "clock", "began", "wall", "backend", "ends_together")


class Writer:
    """Writer of a rank's part into a file. Each ``write`` adds new spans, and open ones again until they end.

    If the file can no longer be written (the disk is full), it warns once, and the program continues.
    """

    def __init__(self, recorder: Recorder, context: Context, path: Path) -> None:
        self._recorder = recorder
        self._lock = host.Lock()
        self._written = 0  # how many of the recorder's entries
        self._steps = 0  # how many of its ends of steps
        self._open: list[int] = []  # the indices of those that were not over
        self._has_failed = False
        self._file = path.open("w")
        about = describe(recorder, context)
        self._line({"format": _FORMAT, **{name: getattr(about, name) for name in _ABOUT}})
        self._file.flush()

    def end(self) -> None:
        """Write what has happened since the last time, and that nothing follows."""
        self.write()
        with self._lock, self._as_far_as_possible(), self._file:
            if not self._has_failed:
                self._line({"is_whole": True})

    def write(self) -> None:
        """Write what has happened since the last time."""
        with self._lock, self._as_far_as_possible():
            if self._has_failed:
                return
            entries = self._recorder.entries
            last = len(entries)
            numbers = [*self._open, *range(self._written, last)]
            self._open, self._written = [], last
            for number in numbers:
                span = entries[number].span(self._recorder.began)
                if span.end is None:
                    self._open.append(number)
                self._line([number, *(getattr(span, name) for name in _FIELDS)])
            ends = [(end - self._recorder.began, how) for end, how in self._recorder.step_ends[self._steps :]]
            self._steps += len(ends)
            self._line({"seconds": self._recorder.seconds, "steps": ends})
            self._file.flush()

    @contextmanager
    def _as_far_as_possible(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"{self._file.name} cannot be written any more ({error}): the program goes on, but the "
                    f"trace lacks what this rank does from about {self._recorder.seconds:.1f} s on",
                    stacklevel=2,
                )

    def _line(self, what: object) -> None:
        self._file.write(json.dumps(what) + "\n")


def read_part(path: Path) -> Part:
    """Read what a ``Writer`` wrote, as far as it got.

    Raises:
        InvalidArgumentError: it is not such a file.
    """
    try:
        return _part(path.read_text().splitlines())
    except (OSError, ValueError, TypeError, LookupError) as error:  # something else with that name
        raise InvalidArgumentError(
            f"{path} is not a recording of a rank ({type(error).__name__}: {error}); expected a file that "
            "`asynccoll trace run` or ASYNCCOLL_TRACE left"
        ) from error


def _part(lines: Sequence[str]) -> Part:
    about: dict[str, Any] = {}
    rows: dict[int, Sequence[Any]] = {}
    ends: list[tuple[float, bool]] = []
    for line in lines:
        try:
            said = json.loads(line)
        except json.JSONDecodeError:  # the last line of a rank that was killed while it wrote
            continue
        if isinstance(said, dict):
            ends += said.pop("steps", ())
            about |= said
        else:
            rows[said[0]] = said[1:]
    if about.get("format") != _FORMAT:
        raise ValueError(f"no line says format {_FORMAT}")
    spans = sorted((Span(*row) for row in rows.values()), key=lambda span: span.start)
    whose = {name: about[name] for name in _ABOUT}
    seconds, is_whole = about.get("seconds", 0.0), about.get("is_whole", False)
    return Part(**whose, seconds=seconds, spans=tuple(spans), steps=steps_of(ends), is_whole=is_whole)

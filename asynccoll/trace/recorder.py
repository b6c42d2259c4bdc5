"""Record what one rank does: its operations, spans of compute, and when steps end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from asynccoll import host
from asynccoll.host.profiling import annotation
from asynccoll.order.operation import Operation
from asynccoll.trace.spans import Span


@dataclass(slots=True, eq=False)
class _Entry:
    """A span under construction: what is known at its start, and its end once there is one."""

    begun: Span  # its times are those of the clock; without an end
    failed: bool = False
    _ends: list[float] = field(default_factory=list)

    def finish(self) -> None:
        """End the span now. If several threads call this, the first one counts."""
        self._ends.append(host.monotonic())

    def span(self, origin: float) -> Span:
        end = self._ends[0] - origin if self._ends else None
        return replace(self.begun, start=self.begun.start - origin, end=end, failed=self.failed)


def _nothing() -> None:
    """Do nothing about a failure."""


class Recorder:
    """The recording of one rank; any thread may add to it."""

    def __init__(self) -> None:
        self.began: float = host.monotonic()
        self.ended: float | None = None
        self.entries: list[_Entry] = []
        #: when steps ended, and whether the program has marked that; else an optimizer has shown it
        self.step_ends: list[tuple[float, bool]] = []
        #: called when an operation has failed, by the thread that sees it
        self.when_failed: Callable[[], object] = _nothing
        #: the operations that are not known to have ended, by their entries
        self._running: dict[_Entry, Operation] = {}
        #: by thread: how many spans that the program marks are open
        self._marking: dict[int, int] = {}

    @contextmanager
    def span(self, name: str, row: str | None = None) -> Iterator[None]:
        """Record a block of compute."""
        thread = host.get_ident()
        entry = self.begin(name, row)
        self._marking[thread] = self._marking.get(thread, 0) + 1
        try:
            with annotation(name):
                yield
        finally:
            self._marking[thread] -= 1
            entry.finish()

    def begin(self, name: str, row: str | None = None, place: str = "") -> _Entry:
        """Begin a span now; its ``finish`` ends it."""
        entry = _Entry(Span(name, row or host.current_thread().name, host.monotonic(), None, place=place))
        self.entries.append(entry)
        return entry

    def is_marked(self) -> bool:
        """Whether the calling thread is in a span that the program marks."""
        return self._marking.get(host.get_ident(), 0) > 0

    def observe(self, operation: Operation, size_bytes: int) -> None:
        """Record ``operation``, which a lane has just accepted."""
        entry = self.note(operation, size_bytes)
        operation.add_waker(lambda: self.over(entry, has_failed(operation)))

    def note(self, operation: Operation, size_bytes: int) -> _Entry:
        """Record the start of ``operation``. Returns an entry, to be passed to ``over`` at its end."""
        entry = _Entry(Span(
            operation.name, row_of(operation), operation.started, None, True, size_bytes, operation.sequence,
            str(operation.place), operation.part, operation.peer, lane_key=operation.lane.key,
        ))  # fmt: skip
        self.entries.append(entry)
        self._running[entry] = operation
        return entry

    def over(self, entry: _Entry, failed: bool) -> None:
        """Record the end of an operation, successful or not."""
        entry.failed = failed
        entry.finish()
        self._running.pop(entry, None)
        if failed:
            self.when_failed()

    def _catch_up(self) -> None:
        """Finish what is over: a waiter may continue before the completing thread has called ``over``."""
        for entry, operation in self._running.copy().items():
            if operation.woke:
                self.over(entry, has_failed(operation))

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans recorded so far, by start."""
        self._catch_up()
        found = (entry.span(self.began) for entry in list(self.entries))
        return tuple(sorted(found, key=lambda span: span.start))

    @property
    def steps(self) -> tuple[float, ...]:
        """When each step ended, in seconds since the recording began: as marked, else as seen."""
        return tuple(end - self.began for end in steps_of(self.step_ends))

    def step(self, *, marked: bool = True) -> None:
        """Record that a step ends now, as the program has ``marked``, or as an optimizer shows."""
        self.step_ends.append((host.monotonic(), marked))

    def end(self) -> None:
        """End the recording; only the ends of what has begun are recorded from now on."""
        self._catch_up()
        self.ended = host.monotonic()

    @property
    def seconds(self) -> float:
        """How long the recording lasted, or has lasted so far."""
        return (self.ended or host.monotonic()) - self.began


def steps_of(ends: Iterable[tuple[float, bool]]) -> tuple[float, ...]:
    """Return when steps ended, in order: the ``ends`` that the program has marked, or else all of them."""
    seen = list(ends)
    marked = [end for end, is_marked in seen if is_marked]
    return tuple(sorted(marked or [end for end, _ in seen]))


def has_failed(operation: Operation) -> bool:
    """Whether an operation that is over has failed, even if there was no waiter."""
    if operation.failure is not None:
        return True
    return operation.completion.done() and operation.completion.error() is not None


def row_of(operation: Operation) -> str:
    """Return the row of the operation's span: its lane, and the group's ranks if that is not the world."""
    group = operation.lane.group
    where = "" if group.is_world else f" of {list(group.ranks)}"
    return f"{operation.lane.name}{where}"

"""What one rank did while it was recorded: operations, spans of compute, and where steps ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.host.profiling import annotation
from asynccoll.trace.spans import Span

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation

__all__ = ["Recorder", "has_failed", "row_of"]


class _Entry:
    """A span while it grows: what is known at its start, and its end once there is one."""

    __slots__ = (
        "_ends",
        "failed",
        "lane_key",
        "name",
        "operation",
        "part",
        "peer",
        "place",
        "row",
        "sequence",
        "size_bytes",
        "start",
    )

    def __init__(self, name: str, row: str, start: float, *, operation: bool = False) -> None:
        self.name: str = name
        self.row: str = row
        self.start: float = start
        self._ends: list[float] = []
        self.operation: bool = operation
        self.size_bytes: int = 0
        self.sequence: int = 0
        self.part: int = 1
        self.peer: int = -1
        self.place: str = ""
        self.failed: bool = False
        self.lane_key: str = ""

    def finish(self) -> None:
        """It ends now. Of several threads that say so, the first counts."""
        self._ends.append(host.monotonic())

    @property
    def end(self) -> float | None:
        return self._ends[0] if self._ends else None

    def span(self, origin: float) -> Span:
        end = self.end
        return Span(
            self.name,
            self.row,
            self.start - origin,
            None if end is None else end - origin,
            self.operation,
            self.size_bytes,
            self.sequence,
            self.place,
            self.part,
            self.peer,
            self.failed,
            self.lane_key,
        )


def _nothing() -> None:
    """Nobody asks for failures."""


class Recorder:
    """Takes down what happens; any thread may add to it."""

    def __init__(self) -> None:
        self.began: float = host.monotonic()
        self.ended: float | None = None
        self.entries: list[_Entry] = []
        #: when steps ended: as the program says, and as optimizers tell
        self.told_steps: list[float] = []
        self.seen_steps: list[float] = []
        #: is called when an operation has failed, by the thread that sees it
        self.when_failed: Callable[[], object] = _nothing
        #: operations that were not over when last looked, by their entries
        self._running: dict[_Entry, Operation] = {}
        #: by thread: how many spans that the program marks are open
        self._marking: dict[int, int] = {}

    @contextmanager
    def span(self, name: str, row: str | None = None) -> Iterator[None]:
        """A block of compute."""
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
        """A span that begins now; its ``finish`` ends it."""
        entry = _Entry(name, row or host.current_thread().name, host.monotonic())
        entry.place = place
        self.entries.append(entry)
        return entry

    def is_marked(self) -> bool:
        """Whether the calling thread is in a span that the program marks."""
        return self._marking.get(host.get_ident(), 0) > 0

    def observe(self, operation: Operation, size_bytes: int) -> None:
        """A lane has accepted ``operation``."""
        entry = self.note(operation, size_bytes)
        operation.add_waker(lambda: self.over(entry, has_failed(operation)))

    def note(self, operation: Operation, size_bytes: int) -> _Entry:
        """Take down its beginning. ``over`` is to be told of its end, with what this returns."""
        entry = _Entry(operation.name, row_of(operation), operation.started, operation=True)
        entry.size_bytes = size_bytes
        entry.sequence = operation.sequence
        entry.part = operation.part
        entry.peer = operation.peer
        entry.place = str(operation.place)
        entry.lane_key = operation.lane.key
        self.entries.append(entry)
        self._running[entry] = operation
        return entry

    def over(self, entry: _Entry, failed: bool) -> None:
        """It has ended, well or not."""
        entry.failed = failed
        entry.finish()
        self._running.pop(entry, None)
        if failed:
            self.when_failed()

    def _catch_up(self) -> None:
        """Finish what is over: a waiter may go on before the completing thread has called ``over``."""
        for entry, operation in list(self._running.items()):
            if operation.woke:
                entry.failed = has_failed(operation)
                entry.finish()

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything recorded so far, by start."""
        self._catch_up()
        found = (entry.span(self.began) for entry in list(self.entries))
        return tuple(sorted(found, key=lambda span: span.start))

    @property
    def steps(self) -> tuple[float, ...]:
        """When each step ended, in seconds since the recording began: as told, else as seen."""
        return tuple(sorted(end - self.began for end in self.told_steps or self.seen_steps))

    def step(self) -> None:
        """The program says that a step ends."""
        self.told_steps.append(host.monotonic())

    def end(self) -> None:
        """Nothing more is taken down, but for the ends of what has begun."""
        self._catch_up()
        self.ended = host.monotonic()

    @property
    def seconds(self) -> float:
        """How long the recording lasted, or has lasted so far."""
        return (self.ended or host.monotonic()) - self.began


def has_failed(operation: Operation) -> bool:
    """Whether an operation that is over ended badly; nobody need have waited for it."""
    if operation.failure is not None:
        return True
    return operation.completion.done() and operation.completion.error() is not None


def row_of(operation: Operation) -> str:
    """The row of its span: its lane, and the ranks of its group if that is not the world."""
    group = operation.lane.group
    where = "" if group.is_world else f" of {list(group.ranks)}"
    return f"{operation.lane.name}{where}"

"""``as_completed``: yield works one by one, in the order in which they become done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from asynccoll import host
from asynccoll.host.misfits import fitting
from asynccoll.host.timeouts import check_patience
from asynccoll.order.operation import Operation
from asynccoll.waiting.suspending import Signal, attend, late, pause
from asynccoll.waiting.together import listed_works
from asynccoll.waiting.work import Work

T = TypeVar("T")


@fitting
async def as_completed(works: Iterable[Work[T]], *, timeout: float | None = None) -> AsyncIterator[Work[T]]:
    """Yield each of ``works`` as it becomes done, the fastest first; works of one lane in the lane's order.

    ``async for work in ac.as_completed(works): x = work.result()``. After ``timeout`` seconds in total, or
    the timeout of a work in flight, ``CollectiveTimeoutError`` is raised; the works remain awaitable.
    """
    check_patience(timeout)
    arrivals = _Arrivals(listed_works("as_completed", works))
    deadline = host.monotonic() + (math.inf if timeout is None else timeout)
    try:
        for _ in range(arrivals.left):
            yield await arrivals.next(deadline)
    finally:  # the loop may be broken off, as by a cancellation
        arrivals.leave()


class _Attending:
    """An awaitable that waits for ``work`` in place if that is likely to be enough.

    Awaiting it returns whether the work is done; it does not suspend the task until then.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Work[Any]) -> None:
        self._work = work

    def __await__(self) -> Generator[object, object, bool]:
        if not (self._work.pending and self._work._operations):
            yield from pause()
            return True
        for operation in self._work._operations:
            if not (yield from attend(operation)):
                return False
        return True


def _line_of(work: Work[Any]) -> object:
    """Return a key that works share if they end one after another: for a collective, its lane.

    For a message, and for a work of several operations, the key is the work itself: no other work shares it.
    """
    operations = work._operations
    return operations[0].lane if len(operations) == 1 and operations[0].sequence else work


def _rank_in_line(work: Work[Any]) -> list[tuple[int, int]]:
    """Return the key that sorts the works of one line into the order in which they end."""
    return [(operation.sequence, operation.part) for operation in work._operations]


class _Line:
    """The indices of works that end one after another, without those that were taken."""

    __slots__ = ("leave", "places")

    def __init__(self) -> None:
        self.places: deque[int] = deque()
        #: ends the wait for the first of these works, which reports when it is done; None if nothing does
        self.leave: Callable[[], object] | None = None


class _Arrivals(Generic[T]):
    """Works in the order in which they became done, for one task.

    Works of one lane end in order. So only the first of them is checked and given a callback: callbacks cost
    the completing thread time, and later works may be done by the time the callback has run.
    """

    def __init__(self, works: list[Work[T]]) -> None:
        self._works: list[Work[T] | None] = [*works]  # None: taken, and no longer kept in memory
        self.left = len(self._works)
        self._first = 0  # all works before this index have been taken
        self._arrived: deque[Work[T]] = deque()
        lines: dict[object, _Line] = {}
        self._line_at: list[_Line] = []
        for place, work in enumerate(works):
            work.wanted()
            line = lines.setdefault(_line_of(work), _Line())
            line.places.append(place)
            self._line_at.append(line)
        for line in lines.values():
            line.places = deque(sorted(line.places, key=lambda place: _rank_in_line(works[place])))
        self._told = deque(lines.values())  # lines whose first work may be done
        self._unwatched = deque(lines.values())
        self._signal = Signal()
        self._due = self._deadline()

    async def next(self, deadline: float) -> Work[T]:
        if self._take():
            await _Attending(self._arrived[0])  # only to yield to the loop if its turn is over
        while not self._take():
            # Usually the work listed first ends first, and soon: waiting in place then saves a wake-up.
            if await self._oldest_ends():
                continue
            self._signal = Signal()  # before _told is read below: works that end after that set this signal
            self._watch()
            if self._told or await self._signal.wait(min(deadline, self._due) - host.monotonic()):
                continue
            self._due = self._deadline()  # the operation with the earliest deadline may have ended since
            if host.monotonic() >= min(deadline, self._due) and (out := list(self._out())):
                lost = [one for one in out if one.tell()]  # their works are done now, and are yielded first
                if not lost:
                    _give_up(out)
        return self._arrived.popleft()

    def leave(self) -> None:
        """End the waits for the works that were not yielded."""
        for line in self._line_at:
            if (leave := line.leave) is not None:
                line.leave = None
                leave()
        for work in (*self._arrived, *self._works):
            if work is not None:
                work.leave()

    def _take(self) -> bool:
        """Move the works that are done to ``_arrived``. Returns whether there are any."""
        while self._told:
            line = self._told.popleft()
            while line.places and (work := self._at(line.places[0])).done():
                self._works[line.places.popleft()] = None
                self._arrived.append(work)
                if line.leave is not None:
                    line.leave = None
                    self._unwatched.append(line)
        return bool(self._arrived)

    def _at(self, place: int) -> Work[T]:
        work = self._works[place]
        assert work is not None
        return work

    async def _oldest_ends(self) -> bool:
        """Wait in place for the first work in the first remaining work's line. Returns whether it is done."""
        while self._works[self._first] is None:
            self._first += 1
        line = self._line_at[self._first]
        if await _Attending(self._at(line.places[0])):
            self._told.append(line)
            return True
        return False

    def _watch(self) -> None:
        """Make the first work of each line call ``_tell`` when it is done."""
        while self._unwatched:
            line = self._unwatched.popleft()
            if line.places:
                line.leave = self._at(line.places[0]).attended(partial(self._tell, line))

    def _tell(self, line: _Line, _: Work[T]) -> None:
        """Note that the first work of ``line`` is done. Runs on the completing thread."""
        self._told.append(line)
        self._signal.set()

    def _out(self) -> Iterator[Operation]:
        return (
            operation
            for work in self._works
            if work is not None
            for operation in work._operations
            if not operation.done()
        )

    def _deadline(self) -> float:
        """Return the earliest deadline of the operations in flight; infinity if there are none."""
        return min((operation.deadline for operation in self._out()), default=math.inf)


def _give_up(out: list[Operation]) -> NoReturn:
    """Raise the timeout error of the first operation in flight, ``out[0]``, and extend all deadlines."""
    oldest, *others = out
    for operation in others:
        operation.extend()
    raise late(oldest, f"; as_completed waits for {len(others)} more" if others else "")

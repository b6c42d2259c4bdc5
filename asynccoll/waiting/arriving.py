"""``as_completed``: works one by one, in the order in which they become done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from asynccoll import host
from asynccoll.host.misfits import fitting
from asynccoll.host.timeouts import check_patience
from asynccoll.waiting.suspending import Signal, attend, late, pause
from asynccoll.waiting.work import Work, listed_works

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation

__all__ = ["as_completed"]

T = TypeVar("T")


@fitting
async def as_completed(works: Iterable[Work[T]], *, timeout: float | None = None) -> AsyncIterator[Work[T]]:
    """Each of ``works`` as it becomes done, the fastest first; those of one lane in the lane's order.

    ``async for work in ac.as_completed(works): x = work.result()``. Past ``timeout`` seconds in all, or past
    the timeout of a work in flight, ``CollectiveTimeoutError`` is raised; the works stay awaitable.
    """
    check_patience(timeout)
    arrivals = _Arrivals(listed_works("as_completed", works))
    deadline = host.monotonic() + (math.inf if timeout is None else timeout)
    for _ in range(arrivals.left):
        yield await arrivals.next(deadline)


class _Attending:
    """Awaitable: whether ``work`` is done, or ends while it is waited for in place."""

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
    """What works share that end one after the other: collectives a lane; messages nothing."""
    operations = work._operations
    return operations[0].lane if len(operations) == 1 and operations[0].sequence else work


class _Line:
    """Where, among the works, those are that end one after the other."""

    __slots__ = ("places", "watched")

    def __init__(self) -> None:
        self.places: deque[int] = deque()
        self.watched = False  # whether the first of them tells when it is done


class _Arrivals(Generic[T]):
    """Works in the order in which they became done, for one task.

    Of those on one lane, which end in their order, only the first is looked at, and asked to tell when it is
    done: a callback costs a turn of the completing thread, and others behind it may be done by then.
    """

    def __init__(self, works: list[Work[T]]) -> None:
        self._works: list[Work[T] | None] = [*works]  # None: taken, and let go of
        self.left = len(self._works)
        self._first = 0  # the oldest that is not taken
        self._arrived: deque[Work[T]] = deque()
        lines: dict[object, _Line] = {}
        self._line_at: list[_Line] = []
        for place, work in enumerate(works):
            work._heard = True
            work._send()
            line = lines.setdefault(_line_of(work), _Line())
            line.places.append(place)
            self._line_at.append(line)
        self._told = deque(lines.values())  # whose first may be done
        self._unwatched = deque(lines.values())
        self._signal = Signal()
        self._due = self._deadline()

    async def next(self, deadline: float) -> Work[T]:
        if self._take():
            await _Attending(self._arrived[0])  # only to give the loop the turn that may be due
        while not self._take():
            # Most often the first to start is the first to end, and soon: then nobody has to be woken.
            if await self._oldest_ends():
                continue
            self._signal = Signal()  # before the second look: what is told after it sets this one
            self._watch()
            if self._told or await self._signal.wait(min(deadline, self._due) - host.monotonic()):
                continue
            self._due = self._deadline()  # whose time it was may have come meanwhile
            if host.monotonic() >= min(deadline, self._due):
                self._give_up()
        return self._arrived.popleft()

    def _take(self) -> bool:
        """Take those that are done; whether there are any."""
        while self._told:
            line = self._told.popleft()
            while line.places and (work := self._at(line.places[0])).done():
                self._works[line.places.popleft()] = None
                self._arrived.append(work)
                if line.watched:
                    line.watched = False
                    self._unwatched.append(line)
        return bool(self._arrived)

    def _at(self, place: int) -> Work[T]:
        work = self._works[place]
        assert work is not None
        return work

    async def _oldest_ends(self) -> bool:
        """Wait in place for the work that has been out longest; whether it is done."""
        while self._works[self._first] is None:
            self._first += 1
        line = self._line_at[self._first]
        if await _Attending(self._at(line.places[0])):
            self._told.append(line)
            return True
        return False

    def _watch(self) -> None:
        """Let the first of each line tell when it is done."""
        while self._unwatched:
            line = self._unwatched.popleft()
            if line.places:
                line.watched = True
                self._at(line.places[0]).add_done_callback(partial(self._tell, line))

    def _tell(self, line: _Line, _: Work[T]) -> None:
        """On the completing thread."""
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
        """When the waiting for one of those that are in flight ends at the latest."""
        return min((operation.deadline for operation in self._out()), default=math.inf)

    def _give_up(self) -> NoReturn:
        """Say of the oldest why it is not done; all of them have as long again."""
        oldest, *others = self._out()
        for operation in others:
            operation.extend()
        raise late(oldest, f"; as_completed waits for {len(others)} more" if others else "")

"""Operations that are started before a loop needs their results."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from asynccoll.errors import CollectiveMismatchError
from asynccoll.host.misfits import check, check_count, check_function, fitting
from asynccoll.waiting.work import Work

__all__ = ["prefetch"]

T = TypeVar("T")


class prefetch(Generic[T]):  # noqa: N801  # read as a function: `async for x in ac.overlap.prefetch(...)`
    """Yields the results of operations, in order; while one is used, the next ``ahead`` are in flight.

    >>> starts = (partial(ac.all_gather, shard) for shard in shards)
    >>> async for full in ac.overlap.prefetch(starts, ahead=2):
    ...     x = use(full, x)                     # the next two all_gathers run meanwhile

    ``starts`` are functions that start one operation each; they are called in order, from the task (with
    ``for``, the thread) that runs the loop, so ranks that run the same loop start them in the same order.
    Results are not kept: once the loop drops one, its memory is free. If the loop is left early, operations
    in flight still complete, but nothing waits for them.
    """

    @fitting
    def __init__(self, starts: Iterable[Callable[[], Work[T]]], *, ahead: int = 1) -> None:
        check_count("ahead", ahead, least=0)
        check("starts", starts, Iterable, "an iterable of functions that start one operation each")
        self._starts = iter(starts)
        self._ahead = ahead
        self._out: deque[Work[T]] = deque()

    async def __aiter__(self) -> AsyncIterator[T]:
        try:
            while work := self._next():
                try:
                    result = await work[0]
                except CollectiveMismatchError as error:
                    self._explain(error)
                    raise
                yield result
        finally:
            self._detach()

    def __iter__(self) -> Iterator[T]:
        try:
            while work := self._next():
                try:
                    result = work[0].wait()
                except CollectiveMismatchError as error:
                    self._explain(error)
                    raise
                yield result
        finally:
            self._detach()

    def _next(self) -> tuple[Work[T]] | None:
        """Have the next operation and ``ahead`` more in flight; return the next work in a tuple, or None."""
        for start in islice(self._starts, self._ahead + 1 - len(self._out)):
            self._out.append(_started(start))
        return (self._out.popleft(),) if self._out else None

    def _explain(self, error: CollectiveMismatchError) -> None:
        """Add advice to the error of ranks that started different operations. For subclasses."""

    def _detach(self) -> None:
        for work in self._out:
            work.detach()


def _started(start: Callable[[], Work[T]]) -> Work[T]:
    told = "functools.partial(ac.all_gather, x), say; an operation that was already called is in flight"
    check_function("what prefetch starts", start, "a function without arguments", told)
    work = start()
    check("what a function of prefetch returns", work, Work, "a Work, as every call returns")
    return work

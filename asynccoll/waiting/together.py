"""``ac.wait_all``: wait for several works as one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar, cast, overload

from torch.compiler import is_compiling

from asynccoll import host
from asynccoll.errors import still_pending
from asynccoll.host.misfits import check, fitting, misfit
from asynccoll.host.timeouts import check_patience
from asynccoll.waiting.forgotten import NotItsResult
from asynccoll.waiting.work import Work

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
V = TypeVar("V")

#: The advice if some other awaitable is passed to ``wait_all``. The awaitables of optimizers begin only when
#: they are waited for, and call collectives.
_NO_WORK = (
    "coroutines, gradients and steps of optimizers are awaited one by one, or with asyncio.gather; the "
    "last two have a wait(), too"
)


class FirstError:
    """The first error of the waits for several works, each of which is made inside ``with``.

    After one wait has timed out, further late works end immediately: the other ranks are asked only once.
    """

    __slots__ = ("_late", "_told", "error")

    def __init__(self, told: Sequence[BaseException] = ()) -> None:
        """``told``: errors that the user has already received, which do not count."""
        self.error: Exception | None = None
        self._told = told
        self._late = False

    def is_late_too(self, work: Work[Any], until: float = math.inf) -> bool:
        """Whether a wait has timed out, and another one for ``work`` up to ``until`` would do so too."""
        return self._late and work.is_late_too(until)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> bool:
        """Keep an ``Exception``; let any other exception (a cancellation, Ctrl-C) propagate."""
        if not isinstance(error, Exception):
            return False
        if self.error is None and not any(error is one for one in self._told):
            self.error = error
        self._late = self._late or still_pending(error)
        return True


class Together(NotItsResult, Generic[T_co]):
    """Works that are waited for together: ``await`` it, or call ``wait()`` where no event loop runs.

    A wait that was cancelled or timed out can be repeated; the works continue in the meantime.
    """

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work[Any]]) -> None:
        self._works = works

    def __repr__(self) -> str:
        return f"<{len(self._works)} works, {sum(work.done() for work in self._works)} of them done>"

    def __await__(self) -> Generator[object, object, T_co]:
        return self._awaited().__await__()

    async def _awaited(self) -> T_co:
        first = FirstError()
        with _waiting_for(self._works):
            for work in self._works:
                if not first.is_late_too(work):
                    with first:
                        await work
        return self._results(first.error)

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait without an event loop, up to ``timeout`` seconds in total, and return the results.

        Raises:
            CollectiveTimeoutError: a work was not done by then. All of the works continue.
        """
        check_patience(timeout)
        deadline = host.monotonic() + (math.inf if timeout is None else timeout)
        first = FirstError()
        with _waiting_for(self._works):
            for work in self._works:
                left = deadline - host.monotonic()
                if not first.is_late_too(work, deadline):
                    with first:
                        work.wait(max(0.0, left) if left < math.inf else None)
        return self._results(first.error)

    def _told(self) -> None:
        for work in self._works:
            work._told()

    def _results(self, first: Exception | None) -> T_co:
        if first is not None:
            raise first
        results: Any = tuple(work.result() for work in self._works)
        return results  # type: ignore[no-any-return]  # the overloads of ``wait_all`` say of which types


class _InAGraph:
    """The counterpart of ``Together`` while torch compiles: the graph waits one by one, without a timeout."""

    def __init__(self, works: Sequence[Work[Any]]) -> None:
        self.works = works

    def wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        return tuple([work.wait() for work in self.works])


@contextmanager
def _waiting_for(works: Sequence[Work[Any]]) -> Iterator[None]:
    """Prepare for waiting for all ``works`` in the block: send those that were deferred first.

    If the block is cut short (by cancellation or Ctrl-C), note that for each work that is still pending.
    """
    for work in works:
        with suppress(Exception):  # a call refused when it is sent: the wait for its work raises the error
            work.wanted()
    try:
        yield
    except BaseException:
        for work in works:
            work.leave()
        raise


@overload
def wait_all(works: tuple[Work[T], Work[U]]) -> Together[tuple[T, U]]: ...
@overload
def wait_all(works: tuple[Work[T], Work[U], Work[V]]) -> Together[tuple[T, U, V]]: ...
@overload
def wait_all(works: Iterable[Work[T]]) -> Together[tuple[T, ...]]: ...
@fitting
def wait_all(works: Iterable[Work[Any]]) -> Together[Any]:
    """Wait until all ``works`` are done, and return their results in the same order.

    Every work is waited for even if one fails; then the first error (in order) is raised. The calling task
    awaits the works one after another, without a task for each. ``await`` the returned object, or call its
    ``wait(timeout)`` where no event loop runs.

    >>> total, scores = await ac.wait_all((ac.all_reduce(loss), ac.all_gather(score)))
    >>> total, scores = ac.wait_all((ac.all_reduce(loss), ac.all_gather(score))).wait()

    Raises:
        InvalidCallError: ``works`` are not works, or a single one (a ``TypeError``).
    """
    if is_compiling():  # the works are nodes of a graph
        return cast("Together[Any]", _InAGraph(list(works)))
    return Together(listed_works("wait_all", works))


def listed_works(called: str, works: Iterable[Work[T]]) -> list[Work[T]]:
    """Return ``works`` as a list; refuse an element that is no ``Work``. ``called``: the public function."""
    if isinstance(works, NotItsResult) or not isinstance(works, Iterable):
        instead = _NO_WORK if isinstance(works, Awaitable) else ""
        instead = f"write {called}([work])" if isinstance(works, Work) else instead
        raise misfit(f"works of {called}", "a list of Works", works, instead)
    instead = f"write {called}(works.values())" if isinstance(works, Mapping) else _NO_WORK
    listed = list(works)
    for index, work in enumerate(listed):
        check(f"works[{index}] of {called}", work, Work, "a Work, as every call returns", instead)
    return listed

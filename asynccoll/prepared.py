"""Operations that are planned once and started every step.

``prepare`` does what is the same each time (the plan, the checks, the memory); ``start`` is the native call
and what is noted down about it. It is the same ``Call`` that the ordinary function makes and starts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from asynccoll.coalescing import open_batch
from asynccoll.errors import InvalidArgumentError, NotInitializedError
from asynccoll.group import resolve_group
from asynccoll.lane import Lane
from asynccoll.lanes import current_lane
from asynccoll.payload.preparing import prepared_calls
from asynccoll.runtime import current
from asynccoll.spec import Op
from asynccoll.tensors import Call
from asynccoll.tensors.common import OFFLOAD_BYTES
from asynccoll.work import Work, combine

__all__ = ["Prepared", "prepare"]

T = TypeVar("T")


class Prepared(Generic[T]):
    """A collective bound to its memory: ``start()`` sends what its input holds then. Made by ``prepare``."""

    __slots__ = (
        "_calls",
        "_context",
        "_estimate",
        "_finish",
        "_lane",
        "_last",
        "_refill",
        "_timeout",
        "name",
    )

    def __init__(
        self,
        name: str,
        lane: Lane,
        calls: list[Call],
        finish: Callable[[], Any] | None,
        timeout: float | None,
    ) -> None:
        self.name = name
        self._lane = lane
        self._context = lane.group.context
        self._calls = calls
        self._finish = finish
        self._timeout = timeout
        self._last: Work[T] | None = None
        only = calls[0] if len(calls) == 1 and finish is None else None
        quick = only is not None and only.program is None and not self._context.policy.check
        if only is not None and only.refill is not None and only.wire.nbytes > OFFLOAD_BYTES:
            quick = False  # a thread copies, if that would hold an event loop
        self._estimate = lane.estimate(name, only.wire.nbytes) if only is not None and quick else None
        self._refill = only.refill if only is not None else None

    def __repr__(self) -> str:
        return f"<Prepared {self.name} on {self._lane}>"

    def start(self) -> Work[T]:
        """Start it with what its input holds now; a ``Work`` as of the ordinary call.

        The result is the same memory every time, so the work has to be awaited before the next start.

        Raises:
            InvalidArgumentError: the work of the start before has not been awaited.
            LaneOrderError, CollectiveError: as of the ordinary call.
        """
        if self._context.closed:
            raise NotInitializedError(f"{self!r} belongs to a context that was finalized; prepare it again")
        try:
            return self._begin()
        except Exception as error:
            self._context.refusals.refuse(self._lane, error)
            raise

    def _begin(self) -> Work[T]:
        last = self._last
        if last is not None and last.pending:
            raise InvalidArgumentError(
                f"{self!r} was started before its last work was awaited, and all starts share their memory: "
                "await each work before the next start, or prepare a second operation"
            )
        batch = open_batch()
        if batch is not None:
            batch.flush_before()  # the program's order
        estimate = self._estimate
        if estimate is None:
            work = self._begin_all()
        else:
            if self._refill is not None:
                self._refill()
            call = self._calls[0]
            operation = self._lane.issue(estimate, call.start, call.wire.nbytes, self._timeout)
            work = Work((operation,), call.finish, call.value)
        self._last = work
        return work

    def _begin_all(self) -> Work[T]:
        with self._lane.together():
            works = [call.begin_again(self._lane, self._timeout) for call in self._calls]
        finish = self._finish
        if finish is None:
            return works[0]
        return combine(works, finish)


def prepare(
    name: str,
    /,
    like: Any,
    *,
    group: Any = None,
    lane: str | None = None,
    timeout: float | None = None,
    **call: Any,
) -> Prepared[Any]:
    """An operation that is planned, checked and given its memory once, to be started every step.

    >>> op = ac.prepare("all_reduce", like=x, op="avg")
    >>> for batch in batches:
    ...     x.copy_(gradient(batch))
    ...     mean = await op.start()       # r0 has x = [1.], r1 has [3.]: [2.] on both

    ``start()`` sends what ``like`` holds at that moment. The result is memory of the operation's own, which
    the next start overwrites, or ``out``; ``out=like`` is the in-place operation.

    Args:
        name: ``all_reduce`` (``op``), ``broadcast`` (``src``), both of a tensor or a tree of tensors, which
            travel packed; ``all_gather``, ``reduce_scatter`` (``op``), along dim 0; ``all_to_all``
            (``input_split_sizes`` and ``output_split_sizes``, or even).
        like: the contiguous tensor that is read at each start.
        group, lane, timeout: as of every operation; settled here, not at ``start``. Every rank prepares and
            starts alike, but preparing sends nothing.
        call: what else the call takes, and ``out``.

    Raises:
        InvalidArgumentError, PayloadTypeError, UnsupportedOpError: as of the ordinary call; also for
            tensors that are not contiguous, or that autograd records (there is no gradient).

    Source: persistent collectives of MPI 4 (``MPI_Allreduce_init``, ``MPI_Start``).
    """
    op = Op.parse(name)
    chosen = resolve_group(current(), group).lane(lane or current_lane())
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise InvalidArgumentError(f"timeout must be None or a positive number of seconds, got {timeout!r}")
    calls, finish = prepared_calls(chosen, op, like, call)
    return Prepared(op.value, chosen, calls, finish, timeout)

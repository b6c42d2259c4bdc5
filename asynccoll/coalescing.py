"""``ac.coalescing``: calls that are made one by one and travel together.

What a tree does for tensors that are at hand at once, a block does for code that issues them one after the
other: ``all_reduce`` and ``broadcast`` of tensors are put off until it ends, and are then fused like the
leaves of a tree, those of one lane, operation and timeout with each other, in the order of their first
calls. So every rank, which makes the same calls, sends the same. Anything else that is called inside, or
awaited, first sends what was put off: the order of the program is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from asynccoll import actors, payload, tensors
from asynccoll.errors import CollectiveError
from asynccoll.lane import Lane
from asynccoll.payload.reducing import all_reduce_tensors
from asynccoll.payload.spreading import broadcast_tensors
from asynccoll.spec import Op, reduce_op
from asynccoll.work import Work

__all__ = ["coalesced", "coalescing", "open_batch"]

T = TypeVar("T")
U = TypeVar("U")


class Deferred(Work[T]):
    """The work of a call that is put off; whoever waits for it sends it, and the others of its block."""

    __slots__ = ("_batch", "_callbacks", "_derived")

    def __init__(self, batch: _Batch) -> None:
        super().__init__((), None)
        self._batch: _Batch | None = batch
        self._derived: list[Deferred[Any]] = []
        self._callbacks: list[Callable[[Work[Any]], object]] = []

    def __repr__(self) -> str:
        return super().__repr__() if self._batch is None else "<Work of a coalescing block: not sent yet>"

    def sent(self, work: Work[Any], finish: Callable[[], Any] | None) -> None:
        """It travels as a part of ``work`` from now on."""
        self._batch = None
        self._operations = work._operations
        if finish is not None:
            self._finish = finish
        for derived in self._derived:
            derived.sent(work, None)
        for callback in self._callbacks:
            self.add_done_callback(callback)

    def abandoned(self, error: BaseException) -> None:
        """It was never sent."""
        self._batch = None
        self._fail(error)
        for derived in self._derived:
            derived.abandoned(error)
        for callback in self._callbacks:
            self.add_done_callback(callback)

    def _send(self) -> None:
        """Send what the block has put off, if this is still among it."""
        if self._batch is not None:
            self._batch.flush()

    def __await__(self) -> Generator[Any, Any, T]:
        self._send()
        return super().__await__()

    def wait(self, timeout: float | None = None) -> T:
        """As of every work."""
        self._send()
        return super().wait(timeout)

    def done(self) -> bool:
        """As of every work; no before it is sent."""
        return self._batch is None and super().done()

    def map(self, function: Callable[[T], U]) -> Work[U]:
        """As of every work."""
        if self._batch is None:
            return super().map(function)
        self._heard = True
        derived: Deferred[U] = Deferred(self._batch)
        derived._finish = lambda: function(self._outcome())
        self._derived.append(derived)
        return derived

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """As of every work."""
        if self._batch is None:
            super().add_done_callback(callback)
        else:
            self._callbacks.append(callback)


#: Starts a collective of many tensors: (lane, tensors, outs, timeout).
_StartMany = Callable[[Lane, list[torch.Tensor], "list[torch.Tensor] | None", "float | None"], Work[Any]]


class _Parts:
    """Calls of one kind, which will travel together."""

    __slots__ = ("lane", "outs", "start", "timeout", "works", "xs")

    def __init__(self, lane: Lane, start: _StartMany, timeout: float | None, fills: bool) -> None:
        self.lane = lane
        self.start = start
        self.timeout = timeout
        self.xs: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] | None = [] if fills else None
        self.works: list[Deferred[Any]] = []

    def send(self) -> None:
        try:
            with self.lane.together():
                work = self.start(self.lane, self.xs, self.outs, self.timeout)
        except Exception as error:
            self.abandon(error)
            raise
        work.detach()
        for index, deferred in enumerate(self.works):
            deferred.sent(work, partial(_part, work, index))

    def abandon(self, error: Exception) -> None:
        """Tell the peers, who may be sending theirs, and whoever waits here."""
        self.lane.group.context.refusals.refuse(self.lane, error)
        for deferred in self.works:
            deferred.abandoned(error)


def _part(work: Work[Any], index: int) -> Any:
    return work.result()[index]


class _Batch:
    """What a block has put off, by kind, in the order of the first call of each."""

    __slots__ = ("_actor", "_parts")

    def __init__(self) -> None:
        self._actor = actors.current().actor
        self._parts: dict[Any, _Parts] = {}

    @property
    def is_mine(self) -> bool:
        """Whether the caller opened the block: tasks that it started send as ever."""
        return actors.current().actor is self._actor

    def take(
        self, lane: Lane, start: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
    ) -> Work[Any] | None:
        """Put the call off; or, if it is none of those, send what was put off and return None."""
        x, out = args[0] if args else None, args[-1] if args else None
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            if start is payload.all_reduce:
                op = reduce_op(args[1])
                tensors.plan_for(lane, Op.ALL_REDUCE, x, op)
                return self._put_off(lane, ("all_reduce", op), partial(_all_reduce, op), x, out, timeout)
            if start is payload.broadcast and not args[2]:
                index = lane.group.index(args[1], "src")
                tensors.plan_for(lane, Op.BROADCAST, x)
                return self._put_off(lane, ("broadcast", index), partial(_broadcast, index), x, out, timeout)
        self.flush()
        return None

    def _put_off(
        self,
        lane: Lane,
        kind: tuple[Any, ...],
        start: _StartMany,
        x: torch.Tensor,
        out: torch.Tensor | None,
        timeout: float | None,
    ) -> Work[Any]:
        tensors.check_out(out, x, x.shape)
        key = (lane, *kind, timeout, out is None, torch.is_grad_enabled())
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = _Parts(lane, start, timeout, out is not None)
        work: Deferred[Any] = Deferred(self)
        parts.xs.append(x)
        if out is not None and parts.outs is not None:
            parts.outs.append(out)
        parts.works.append(work)
        return work

    def flush(self) -> None:
        """Send what was put off; if one kind is refused, the others are sent all the same."""
        waiting, self._parts = list(self._parts.values()), {}
        first: Exception | None = None
        for parts in waiting:
            try:
                parts.send()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def flush_before(self) -> None:
        """Send what was put off, if it is the caller's, who starts something else."""
        if self.is_mine:
            self.flush()

    def abandon(self, why: BaseException) -> None:
        """The block failed: nothing of it is sent."""
        waiting, self._parts = list(self._parts.values()), {}
        for parts in waiting:
            error = CollectiveError(
                f"not sent: the coalescing block that put it off ended with {type(why).__name__}: {why}"
            )
            error.__cause__ = why
            parts.abandon(error)


def _all_reduce(op: Any, lane: Lane, xs: list[torch.Tensor], outs: Any, timeout: float | None) -> Work[Any]:
    return all_reduce_tensors(lane, xs, op, outs, timeout)


def _broadcast(src: int, lane: Lane, xs: list[torch.Tensor], outs: Any, timeout: float | None) -> Work[Any]:
    return broadcast_tensors(lane, xs, src, outs, timeout)


_batch: ContextVar[_Batch | None] = ContextVar("asynccoll_coalescing", default=None)
open_batch = _batch.get


def coalesced(
    batch: _Batch, lane: Lane, start: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
) -> Work[Any] | None:
    """The work of a call inside the block of ``batch``, if it is put off; else None: start it now."""
    return batch.take(lane, start, args, timeout) if batch.is_mine else None


class coalescing:  # noqa: N801  # read as a statement: `with ac.coalescing():`
    """Calls inside travel together when the block ends: ``with ac.coalescing():`` (or ``async with``).

    >>> with ac.coalescing():
    ...     works = [ac.all_reduce(layer.weight.grad) for layer in layers]
    >>> gradients = await ac.wait_all(works)      # a few large messages instead of one for each layer

    ``all_reduce`` and ``broadcast`` of tensors are put off, in any mixture of lanes, reductions, dtypes and
    devices; every rank has to make the same calls. Other operations inside, and awaiting a work of the
    block, first send what was put off. Tasks that are started inside send as ever.

    If the block ends with an exception, what was put off is not sent: its works raise ``CollectiveError``,
    and peers whose block went well get ``PeerRefusedError`` instead of waiting for it.
    """

    def __init__(self) -> None:
        self._before: list[_Batch | None] = []

    def __enter__(self) -> coalescing:
        outer = _batch.get()
        if outer is not None and outer.is_mine:
            outer.flush()  # its calls were made first
        self._before.append(outer)
        _batch.set(_Batch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        batch = _batch.get()
        _batch.set(self._before.pop())
        assert batch is not None
        if error is None:
            batch.flush()
        else:
            batch.abandon(error)

    async def __aenter__(self) -> coalescing:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, tb)

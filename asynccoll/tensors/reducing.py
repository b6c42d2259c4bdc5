"""all_reduce, reduce and reduce_scatter of one tensor, each as one ``Call``, whatever its plan.

For the sum of sparse tensors all ranks gather all tensors: three ranks with ``(5,)`` and 2, 0 and 1 values
get ``(5,)`` with up to 3 values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.memory.aliasing import may_overlap
from asynccoll.memory.arithmetic import reduce_chunks
from asynccoll.order.job import Start
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import Op, Plan, ReduceOp, Wire
from asynccoll.tensors.common import (
    Call,
    Route,
    check_out,
    deliver,
    delivered,
    encoding_again,
    kept,
    owned,
    reduced,
    route_for,
    sent_as,
    target_for,
    undisturbing,
)
from asynccoll.tensors.fusing import Fuse
from asynccoll.tensors.nodes import nodes_first, scattered_by_node
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion

#: Up to this size a copy costs less than the longer code path of a call that fills another tensor.
_SMALL_BYTES = 64 << 10


def all_reduce_call(lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None) -> Call:
    """Return the call that reduces every rank's ``x``, in ``out`` or new memory with the strides of ``x``."""
    route = route_for(lane, Op.ALL_REDUCE, x, op, x.numel())
    if out is not None and out is not x:
        check_out(out, x, x.shape)
    if x.layout is not torch.strided:
        if out is not None:
            raise InvalidArgumentError("all_reduce: out= is for a dense tensor; a sparse sum is returned")
        return sum_sparse(lane, route.plan, x)
    return _ALL_REDUCE[route.plan.via](lane, route, x, out if route.in_order else kept(x, out))


def all_reduce_fuse(lane: Lane, op: ReduceOp) -> Fuse:
    """Return the all_reduce of many tensors."""
    return Fuse("all_reduce", lambda x, out: all_reduce_call(lane, x, op, out), op.value, op=op)


def _all_reduce_native(lane: Lane, route: Route, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """Reduce by the backend, in memory that starts as a copy of ``x``; node by node, by several calls."""
    plan, size = route.plan, lane.group.size
    wire_op = plan.wire_reduce
    if out is not x and route.keeps_input and plan.direct and _apart(route, x, out):
        return _all_reduce_into(route, x, out)
    wire, fill, refill = owned(route, x, out)
    done: list[torch.Tensor] = []
    value, finish = delivered(wire, plan, out, lambda: reduced(wire, plan, x, size, done).view(x.shape))
    return Call(
        plan,
        lambda communicator: communicator.all_reduce(wire, wire_op),
        wire,
        finish,
        value,
        shape=x.shape,
        detail=plan.reduce,
        fill=fill,
        refill=refill,
        program=nodes_first(lane, wire, wire_op, near=route.near) if plan.via == "nodes" else None,
        done=done,
    )


def _apart(route: Route, x: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether to fill the result from an unchanged ``x``, rather than copy ``x`` and reduce the copy."""
    if out is None and x.nbytes <= _SMALL_BYTES:
        return False
    return route.plain(x) and (out is None or not may_overlap(out, x))


def _all_reduce_into(route: Route, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """Read ``x`` and fill the result: no copy, and nothing to do afterwards."""
    op, target = route.plan.wire_reduce, target_for(out, x, x.shape)
    value, finish = delivered(target, route.plan, out, lambda: target)

    def start(communicator: Any) -> Completion:  # a communicator that has this call
        completion: Completion = communicator.all_reduce_into(target, x, op)
        return completion

    return Call(
        route.plan,
        start,
        x,
        finish,
        value,
        shape=x.shape,
        detail=route.plan.reduce,
    )


def _all_reduce_gathered(lane: Lane, route: Route, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """Gather all ranks' data and reduce it here in rank order, if the backend cannot reduce it."""
    plan = route.plan
    wire = sent_as(route, x)
    rows = torch.empty((lane.group.size, *wire.shape), dtype=wire.dtype, device=wire.device)
    received, sent = rows.view(-1), wire.view(-1)
    return Call(
        plan,
        lambda communicator: communicator.all_gather(received, sent),
        wire,
        lambda: deliver(_reduce_rows(rows.unbind(0), plan, x).view(x.shape), out),
        shape=x.shape,
        detail=plan.reduce,
        refill=encoding_again(wire, x, plan),
    )


def _all_reduce_exchanged(lane: Lane, route: Route, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """Exchange a small tensor with every other rank, one message each way, and reduce in rank order."""
    plan = route.plan
    own = sent_as(route, x).view(-1)
    size, rank = lane.group.size, lane.group.rank
    sent = own if size == 2 else own.repeat(size - 1)
    received = torch.empty_like(sent)
    splits = [own.numel()] * size
    splits[rank] = 0
    rows = [received] if size == 2 else list(received.chunk(size - 1))
    rows.insert(rank, own)
    refill = encoding_again(own, x, plan)
    done: list[torch.Tensor] = []
    return Call(
        plan,
        lambda communicator: communicator.all_to_all(received, sent, splits, splits),
        own,
        lambda: deliver(_total(rows, rank, plan, x, out, done).view(x.shape), out),
        shape=x.shape,
        detail=plan.reduce,
        refill=refill if size == 2 else partial(_repeat_again, refill, sent.view(size - 1, -1), own),
        done=done,
    )


def _repeat_again(refill: Callable[[], object] | None, sent: torch.Tensor, own: torch.Tensor) -> None:
    if refill is not None:
        refill()
    sent.copy_(own)


#: What makes the call, by the plan's ``via``.
_ALL_REDUCE: dict[str, Callable[[Lane, Route, torch.Tensor, torch.Tensor | None], Call]] = {
    "native": _all_reduce_native,
    "nodes": _all_reduce_native,
    "all_gather": _all_reduce_gathered,
    "all_to_all": _all_reduce_exchanged,
}


def _total(
    rows: Sequence[torch.Tensor],
    rank: int,
    plan: Plan,
    x: torch.Tensor,
    out: torch.Tensor | None,
    done: list[torch.Tensor],
) -> torch.Tensor:
    """Return all ranks' rows reduced, in the caller's ``out`` if it is no memory of this rank's row.

    The other rows are in memory of ours. The total is kept in ``done``, since ``out`` may overwrite a row.
    """
    if not done:
        own = rows[rank]
        apart = out is not None and plan.wire is Wire.SAME and not may_overlap(out, own)
        done.append(_reduce_rows(rows, plan, x, target_for(out, own, own.shape) if apart else None))
    return done[0]


def _reduce_rows(
    rows: Sequence[torch.Tensor], plan: Plan, x: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the local half of a composed reduction: return the rows of all ranks, reduced and decoded."""
    op = plan.wire_reduce
    if plan.wire is Wire.REAL:  # pairs of reals are only how complex numbers were sent
        total = reduce_chunks([torch.view_as_complex(row.view(-1, 2)) for row in rows], op)
        return (total.div_(len(rows)) if plan.divide else total).to(x.device, x.dtype)
    return reduced(reduce_chunks(rows, op, into), plan, x, len(rows), [])


def reduce_call(lane: Lane, x: torch.Tensor, dst: int, op: ReduceOp, out: torch.Tensor | None) -> Call:
    """Return the call that reduces every rank's ``x`` to ``dst``; its result is None elsewhere."""
    route = route_for(lane, Op.REDUCE, x, op, x.numel())
    check_out(out, x, x.shape)
    here = lane.group.rank == dst
    made = _reduce_native if route.plan.via == "native" else _reduce_gathered
    call = made(lane, route, x, dst, kept(x, out) if here else None)
    call.detail = f"{op.value} dst={lane.group.ranks[dst]}"
    return call


def _reduce_native(lane: Lane, route: Route, x: torch.Tensor, dst: int, out: torch.Tensor | None) -> Call:
    plan, size = route.plan, lane.group.size
    here = lane.group.rank == dst
    done: list[torch.Tensor] = []
    if route.keeps_input and not here:
        buffer, fill = sent_as(route, x), None
        refill = encoding_again(buffer, x, plan)
    else:
        buffer, fill, refill = owned(route, x, out)
    return Call(
        plan,
        lambda communicator: communicator.reduce(buffer, dst, plan.wire_reduce),
        buffer,
        (lambda: deliver(reduced(buffer, plan, x, size, done).view(x.shape), out)) if here else None,
        shape=x.shape,
        fill=fill,
        refill=refill,
        done=done,
    )


def _reduce_gathered(lane: Lane, route: Route, x: torch.Tensor, dst: int, out: torch.Tensor | None) -> Call:
    """Gather all ranks' data on ``dst`` and reduce it there in rank order, if the backend cannot."""
    plan = route.plan
    wire = sent_as(route, x)
    here = lane.group.rank == dst
    parts = list(wire.new_empty((lane.group.size, *wire.shape)).unbind(0)) if here else None
    return Call(
        plan,
        lambda communicator: communicator.gather(parts, wire, dst),
        wire,
        None if parts is None else lambda: deliver(_reduce_rows(parts, plan, x).view(x.shape), out),
        shape=x.shape,
        refill=encoding_again(wire, x, plan),
    )


def reduce_scatter_call(lane: Lane, rows: torch.Tensor, op: ReduceOp, out: torch.Tensor | None) -> Call:
    """Return the call for row ``rank`` of the reduction of every rank's ``rows``, in ``out`` or new memory.

    ``rows`` has the shape (n, ...).
    """
    route = route_for(lane, Op.REDUCE_SCATTER, rows, op, rows.numel())
    plan, size = route.plan, lane.group.size
    shape = rows.shape[1:]
    check_out(out, rows, shape)
    wire = sent_as(route, rows.reshape(size, -1))
    program = None
    done: list[torch.Tensor] = []
    if plan.via in ("native", "nodes"):
        given = undisturbing(out, wire, lane.group.rank)
        target = target_for(given, wire, shape if plan.direct else wire.shape[1:])
        into, sent = target.view(-1), wire.view(-1)
        start: Start = lambda communicator: communicator.reduce_scatter(into, sent, plan.wire_reduce)  # noqa: E731
        total = lambda: reduced(target, plan, rows, size, done).view(shape)  # noqa: E731
        value, finish = delivered(target, plan, out, total)
        if plan.via == "nodes":
            program = scattered_by_node(lane, into, sent, plan.wire_reduce)
    else:
        start, parts = _exchanged_rows(lane, wire)
        rank = lane.group.rank
        value, finish = None, lambda: deliver(_total(parts, rank, plan, rows, out, done).view(shape), out)
    return Call(
        plan,
        start,
        wire,
        finish,
        value,
        detail=op.value,
        shape=rows.shape,
        refill=encoding_again(wire, rows, plan),
        program=program,
        done=done,
    )


def _exchanged_rows(lane: Lane, wire: torch.Tensor) -> tuple[Start, Sequence[torch.Tensor]]:
    """Return the call that gives this rank its row of every rank's ``wire``, and these rows in rank order."""
    size, rank = lane.group.size, lane.group.rank
    if size == 2:  # this rank's own row need not be sent
        own, sent = wire[rank], wire[1 - rank]
        received = torch.empty_like(sent)
        splits = [sent.shape[0]] * size
        splits[rank] = 0
        rows = (own, received) if rank == 0 else (received, own)
        return lambda communicator: communicator.all_to_all(received, sent, splits, splits), rows
    all_rows, even = torch.empty_like(wire), [1] * size
    return lambda communicator: communicator.all_to_all(all_rows, wire, even, even), all_rows.unbind(0)


def sum_sparse(lane: Lane, plan: Plan, x: torch.Tensor) -> Call:
    """Return the call that sums every rank's sparse ``x``."""
    mine = x.detach().coalesce()
    gathered = _Gathered(mine, lane.group.size)
    values = mine.values()
    detail = f"sum sparse_dim={mine.sparse_dim()}"  # index lengths may differ between tensors of one shape
    return Call(plan, None, values, gathered.total, shape=x.shape, detail=detail, program=gathered.program)


class _Gathered:
    """The indices and values of all ranks. Their number differs, so all are padded to the longest."""

    def __init__(self, mine: torch.Tensor, size: int) -> None:
        self._mine = mine
        self._size = size

    def program(self, communicator: Communicator) -> Generator[Completion, None, Completion]:
        """Gather the counts, then the indices and values."""
        mine, size = self._mine, self._size
        self._counts = torch.empty(size, dtype=torch.int64, device=mine.device)
        here = torch.full((1,), mine.values().shape[0], dtype=torch.int64, device=mine.device)
        yield communicator.all_gather(self._counts, here)
        longest = int(self._counts.max())
        indices, values = mine.indices().t(), mine.values()
        self._indices = indices.new_empty((size, longest, indices.shape[1]))
        self._values = values.new_empty((size, longest, *values.shape[1:]))
        yield communicator.all_gather(self._indices.view(-1), _padded(indices, longest))
        sent = _padded(values, longest).view(torch.uint8)  # as bytes, for any dtype
        return communicator.all_gather(self._values.view(-1).view(torch.uint8), sent)

    def total(self) -> torch.Tensor:
        """Return the sum, in rank order, so that every rank has the same bits."""
        counts = self._counts.tolist()
        indices = torch.cat([row[:count] for row, count in zip(self._indices, counts, strict=True)])
        values = torch.cat([row[:count] for row, count in zip(self._values, counts, strict=True)])
        shape, device = self._mine.shape, self._mine.device
        whole = torch.sparse_coo_tensor(indices.t(), values, shape, device=device, check_invariants=False)
        return whole.coalesce()


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``rows`` padded with zeros to ``count`` rows, and flattened."""
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]].copy_(rows)
    return padded.view(-1)

"""all_reduce, reduce and reduce_scatter of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asynccoll.encoding import encode, reduce_chunks
from asynccoll.errors import InvalidArgumentError
from asynccoll.lane import Lane, Start
from asynccoll.memory import may_overlap, same_memory
from asynccoll.operation import Estimate
from asynccoll.spec import Op, Plan, ReduceOp, Wire
from asynccoll.tensors.common import (
    OFFLOAD_BYTES,
    Call,
    Route,
    check_out,
    copied,
    deliver,
    delivered,
    encoding_again,
    issue,
    owned,
    physical,
    plan_for,
    reduced,
    route_for,
    serves,
    target_for,
)
from asynccoll.tensors.fusing import Fuse
from asynccoll.tensors.nodes import nodes_first
from asynccoll.work import Work

#: Up to here a copy costs less than the longer way of a call that fills another tensor.
_SMALL_BYTES = 64 << 10


def start_all_reduce(
    lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """The reduction of every rank's ``x``, in the shape of ``x``."""
    numel = x.numel()
    route = route_for(lane, Op.ALL_REDUCE, x, op, numel)
    if route.plain(x):
        # The common cases, with as little around the native call as there can be.
        size_bytes = numel * route.itemsize
        if out is x or (out is None and size_bytes <= (_SMALL_BYTES if route.keeps_input else OFFLOAD_BYTES)):
            buffer = x if out is x else copied(x)
            wire_op = route.plan.wire_reduce
            start: Start = lambda communicator: communicator.all_reduce(buffer, wire_op)  # noqa: E731
            return Work((lane.issue(route.estimate, start, size_bytes, timeout),), None, buffer)
    elif (out is x or out is None) and (combine := route.combine(x)) is not None:
        own = x.detach() if x.requires_grad else x
        work = _swapped(
            lane,
            route.estimate,
            combine,
            timeout,
            own=own,
            sent=own,
            out=None if out is None else own,
            size_bytes=numel * route.itemsize,
        )
        return work if out is None or own is x else work.map(lambda _: x)
    return all_reduce_call(lane, x, op, out).begin(lane, timeout)


def all_reduce_call(lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None) -> Call:
    """The all_reduce of ``x`` as one call, with its result in ``out`` or in memory of its own."""
    route = route_for(lane, Op.ALL_REDUCE, x, op, x.numel())
    check_out(out, x, x.shape)
    if route.plain(x) and route.keeps_input and (out is None or not same_memory(out, x)):
        return _all_reduce_into(route, x, out)
    plan = route.plan
    if x.layout is not torch.strided:
        if out is not None:
            raise InvalidArgumentError("all_reduce: out= is for a dense tensor; a sparse sum is returned")
        return _all_reduce_sparse(plan, x)
    if plan.via not in ("native", "nodes"):
        composed = _all_reduce_exchanged if plan.via == "all_to_all" else _all_reduce_gathered
        return composed(lane, plan, x, out)
    wire_op = plan.wire_reduce
    wire, fill, refill = owned(x, plan, out)
    size = lane.group.size
    value, finish = delivered(wire, plan, out, lambda: reduced(wire, plan, x, size).view(x.shape))
    return Call(
        plan,
        lambda communicator: communicator.all_reduce(wire, wire_op),
        wire,
        finish,
        value,
        shape=x.shape,
        detail=op,
        fill=fill,
        refill=refill,
        program=nodes_first(lane, wire, wire_op or op) if plan.via == "nodes" else None,
    )


def _all_reduce_into(route: Route, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """Read ``x`` and fill the result: no copy, and nothing to do afterwards."""
    op = route.plan.wire_reduce
    target = torch.empty_like(x) if out is None else target_for(out, x, x.shape)
    value, finish = delivered(target, route.plan, out, lambda: target)
    return Call(
        route.plan,
        lambda communicator: communicator.all_reduce_into(target, x, op),
        x,
        finish,
        value,
        shape=x.shape,
        detail=op,
    )


def all_reduce_fuse(lane: Lane, op: ReduceOp) -> Fuse:
    """The all_reduce of many tensors."""
    return Fuse("all_reduce", lambda x, out: all_reduce_call(lane, x, op, out), op.value)


def _all_reduce_sparse(plan: Plan, x: torch.Tensor) -> Call:
    buffer = x.detach().coalesce().clone()
    return Call(
        plan,
        lambda communicator: communicator.all_reduce(buffer, ReduceOp.SUM),
        buffer._values(),
        None,
        buffer,
        shape=x.shape,
        detail="sum sparse",
    )


def _all_reduce_gathered(lane: Lane, plan: Plan, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """For reductions that no backend arithmetic has: everybody's data, reduced in rank order."""
    wire = encode(physical(x), plan)
    size = lane.group.size
    rows = torch.empty((size, *wire.shape), dtype=wire.dtype, device=wire.device)
    received, sent = rows.view(-1), wire.view(-1)
    return Call(
        plan,
        lambda communicator: communicator.all_gather(received, sent),
        wire,
        lambda: deliver(_reduce_rows(rows.unbind(0), plan, x).view(x.shape), out),
        shape=x.shape,
        detail=plan_detail(plan),
        refill=encoding_again(wire, x, plan),
    )


def _all_reduce_exchanged(lane: Lane, plan: Plan, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """Of a small tensor: one message to and from every other rank, reduced in rank order."""
    own = encode(physical(x), plan).view(-1)
    size, rank = lane.group.size, lane.group.rank
    sent = own if size == 2 else own.repeat(size - 1)
    received = torch.empty_like(sent)
    splits = [own.numel()] * size
    splits[rank] = 0
    rows = [received] if size == 2 else list(received.chunk(size - 1))
    rows.insert(rank, own)
    # The first two rows are read before anything is written: there ``out`` may be ``x`` itself, but torch
    # refuses one that lies across it.
    reuses = out is not None and rank < 2 and (same_memory(out, own) or not may_overlap(out, own))

    def total() -> torch.Tensor:
        into = target_for(out, own, own.shape) if reuses else None
        return deliver(_reduce_rows(rows, plan, x, into).view(x.shape), out)

    refill = encoding_again(own, x, plan)
    if size > 2:
        encoded = refill

        def refill() -> None:
            if encoded is not None:
                encoded()
            sent.view(size - 1, -1).copy_(own)

    return Call(
        plan,
        lambda communicator: communicator.all_to_all(received, sent, splits, splits),
        own,
        total,
        shape=x.shape,
        detail=plan_detail(plan),
        refill=refill,
    )


def _swapped(
    lane: Lane,
    estimate: Estimate,
    combine: Callable[..., torch.Tensor],
    timeout: float | None,
    *,
    own: torch.Tensor,
    sent: torch.Tensor,
    out: torch.Tensor | None,
    size_bytes: int,
) -> Work[torch.Tensor]:
    """``own`` reduced with what the other of two ranks has ``sent``: plain tensors of one shape.

    As little around the message as there can be. ``own``, ``sent`` and ``out`` may be one.
    """
    first = lane.group.rank == 0
    received = torch.empty_like(sent)
    count = sent.shape[0]
    splits = [0, count] if first else [count, 0]
    rows = (own, received) if first else (received, own)
    start: Start = lambda communicator: communicator.all_to_all(received, sent, splits, splits)  # noqa: E731
    into = received if out is None else out
    total = lambda: combine(*rows, out=into)  # noqa: E731
    return Work((lane.issue(estimate, start, size_bytes, timeout),), total)


def _reduce_rows(
    rows: Sequence[torch.Tensor], plan: Plan, x: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The local half of a composed reduction: the rows of all ranks, reduced and decoded."""
    op = plan.wire_reduce or ReduceOp.SUM
    if plan.wire is Wire.REAL:  # pairs of reals are only how complex numbers travelled
        total = reduce_chunks([torch.view_as_complex(row.view(-1, 2)) for row in rows], op)
        return total.div_(len(rows)) if plan.divide else total
    return reduced(reduce_chunks(rows, op, into), plan, x, len(rows))


def plan_detail(plan: Plan) -> str:
    """The part of a signature that names the reduction."""
    return plan.reduce.value if plan.reduce is not None else ""


def start_reduce(
    lane: Lane,
    x: torch.Tensor,
    dst: int,
    op: ReduceOp,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[torch.Tensor | None]:
    """The reduction on ``dst``, None elsewhere."""
    route = route_for(lane, Op.REDUCE, x, op, x.numel())
    plan = route.plan
    check_out(out, x, x.shape)
    here = lane.group.rank == dst
    size = lane.group.size
    detail = f"{op.value} dst={lane.group.ranks[dst]}"
    if plan.via != "native":
        wire = encode(physical(x), plan)
        rows = torch.empty((size if here else 0, *wire.shape), dtype=wire.dtype, device=wire.device)
        parts = list(rows.unbind(0)) if here else None
        operation = issue(
            lane,
            plan,
            lambda communicator: communicator.gather(parts, wire, dst),
            wire,
            timeout,
            detail=detail,
            shape=x.shape,
        )
        if not here:
            return Work((operation,), lambda: None)
        received = list(rows.unbind(0))
        return Work((operation,), lambda: deliver(_reduce_rows(received, plan, x).view(x.shape), out))
    if route.keeps_input and not here:
        buffer = encode(physical(x), plan)
        fill, refill = None, encoding_again(buffer, x, plan)
    else:
        buffer, fill, refill = owned(x, plan, out if here else None)
    call = Call(
        plan,
        lambda communicator: communicator.reduce(buffer, dst, plan.wire_reduce),
        buffer,
        (lambda: deliver(reduced(buffer, plan, x, size).view(x.shape), out)) if here else None,
        shape=x.shape,
        detail=detail,
        fill=fill,
        refill=refill,
    )
    return call.begin(lane, timeout)


def start_reduce_scatter(
    lane: Lane, rows: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Row ``rank`` of the reduction of every rank's ``rows`` (n, ...)."""
    numel, shape = rows.numel(), rows.shape[1:]
    route = route_for(lane, Op.REDUCE_SCATTER, rows, op, numel)
    combine = route.combine(rows) if numel and shape and not rows.requires_grad else None
    if combine is not None and (out is None or serves(out, rows, shape)):
        both = rows.unbind(0)
        rank = lane.group.rank
        return _swapped(
            lane,
            route.estimate,
            combine,
            timeout,
            own=both[rank],
            sent=both[1 - rank],
            out=out,
            size_bytes=rows.nbytes,
        )
    return reduce_scatter_call(lane, rows, op, out).begin(lane, timeout)


def reduce_scatter_call(lane: Lane, rows: torch.Tensor, op: ReduceOp, out: torch.Tensor | None) -> Call:
    """The same as one call, with its result in ``out`` or in memory of its own."""
    plan = plan_for(lane, Op.REDUCE_SCATTER, rows, op)
    size = lane.group.size
    part_shape = rows.shape[1:]
    check_out(out, rows, part_shape)
    wire = encode(physical(rows.reshape(size, -1)), plan)
    wire_op = plan.wire_reduce or op
    if plan.via == "native":
        target = target_for(out, wire, wire.shape[1:])
        into, sent = target.view(-1), wire.view(-1)
        start: Start = lambda communicator: communicator.reduce_scatter(into, sent, wire_op)  # noqa: E731
        total: Callable[[], torch.Tensor] = partial(reduced, target, plan, rows, size)
    else:
        received = torch.empty_like(wire)
        even = [1] * size
        start = lambda communicator: communicator.all_to_all(received, wire, even, even)  # noqa: E731
        parts = received.unbind(0)
        total = lambda: _reduce_rows(parts, plan, rows, target_for(out, wire, wire.shape[1:]))  # noqa: E731
    return Call(
        plan,
        start,
        wire,
        lambda: deliver(total().view(part_shape), out),
        detail=op.value,
        shape=rows.shape,
        refill=encoding_again(wire, rows, plan),
    )

"""all_reduce, reduce and reduce_scatter of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asynccoll.encoding import encode, reduce_chunks
from asynccoll.lane import Lane, Start
from asynccoll.spec import Op, Plan, ReduceOp, Wire
from asynccoll.tensors.common import (
    OFFLOAD_BYTES,
    Route,
    check_out,
    deliver,
    fresh,
    issue,
    owned,
    physical,
    plan_for,
    reduced,
    route_for,
    target_for,
)
from asynccoll.work import Work


def start_all_reduce(
    lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """The reduction of every rank's ``x``, in the shape of ``x``."""
    numel = x.numel()
    route = route_for(lane, Op.ALL_REDUCE, x, op, numel)
    plan = route.plan
    wire_op = plan.wire_reduce
    if route.plain(x):
        # The common cases, with as little around the native call as there can be.
        size_bytes = numel * route.itemsize
        if route.into and out is not x:
            return _all_reduce_into(lane, route, x, out, timeout)
        if out is x or (out is None and size_bytes < OFFLOAD_BYTES):
            buffer = x if out is x else fresh(x)
            start: Start = lambda communicator: communicator.all_reduce(buffer, wire_op)  # noqa: E731
            return Work((lane.issue(route.estimate, start, size_bytes, timeout),), None, buffer)
    check_out(out, x, x.shape)
    if x.layout is not torch.strided:
        return _all_reduce_sparse(lane, plan, x, timeout)
    if plan.via != "native":
        composed = _all_reduce_exchanged if plan.via == "all_to_all" else _all_reduce_gathered
        return composed(lane, plan, x, out, timeout)
    wire, copy = owned(x, plan, out)
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_reduce(wire, wire_op),
        wire,
        timeout,
        detail=op,
        shape=x.shape,
        before=copy,
    )
    if plan.direct:
        return Work((operation,), partial(deliver, wire, out))
    size = lane.group.size
    return Work((operation,), lambda: deliver(reduced(wire, plan, x, size).view(x.shape), out))


def _all_reduce_into(
    lane: Lane, route: Route, x: torch.Tensor, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Read ``x`` and fill the result: no copy, and nothing to do afterwards."""
    op = route.plan.wire_reduce
    if out is None:
        target = torch.empty_like(x)
    else:
        check_out(out, x, x.shape)
        target = target_for(out, x, x.shape)
    start: Start = lambda communicator: communicator.all_reduce_into(target, x, op)  # noqa: E731
    operation = lane.issue(route.estimate, start, x.nbytes, timeout)
    if out is None:
        return Work((operation,), None, target)
    return Work((operation,), partial(deliver, target, out))


def _all_reduce_sparse(lane: Lane, plan: Plan, x: torch.Tensor, timeout: float | None) -> Work[torch.Tensor]:
    buffer = x.detach().coalesce().clone()
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_reduce(buffer, ReduceOp.SUM),
        buffer._values(),
        timeout,
        detail="sum sparse",
        shape=x.shape,
    )
    return Work((operation,), lambda: buffer)


def _all_reduce_gathered(
    lane: Lane, plan: Plan, x: torch.Tensor, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """For reductions that no backend arithmetic has: everybody's data, reduced in rank order."""
    wire = encode(physical(x), plan)
    size = lane.group.size
    rows = torch.empty((size, *wire.shape), dtype=wire.dtype, device=wire.device)
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_gather(rows.view(-1), wire.view(-1)),
        wire,
        timeout,
        detail=plan_detail(plan),
        shape=x.shape,
    )
    return Work((operation,), lambda: deliver(_reduce_rows(rows.unbind(0), plan, x).view(x.shape), out))


def _all_reduce_exchanged(
    lane: Lane, plan: Plan, x: torch.Tensor, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Of a small tensor: one message to and from every other rank, reduced in rank order."""
    own = encode(physical(x), plan).view(-1)
    size, rank = lane.group.size, lane.group.rank
    sent = own if size == 2 else own.repeat(size - 1)
    received = torch.empty_like(sent)
    splits = [own.numel()] * size
    splits[rank] = 0
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_to_all(received, sent, splits, splits),
        own,
        timeout,
        detail=plan_detail(plan),
        shape=x.shape,
    )

    def total() -> torch.Tensor:
        rows = [received] if size == 2 else list(received.chunk(size - 1))
        rows.insert(rank, own)
        # The first two rows are read before anything is written: there ``out`` may be ``x`` itself.
        into = target_for(out, own, own.shape) if out is not None and rank < 2 else None
        return deliver(_reduce_rows(rows, plan, x, into).view(x.shape), out)

    return Work((operation,), total)


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
    plan = plan_for(lane, Op.REDUCE, x, op)
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
        total: Callable[[], torch.Tensor] = partial(_reduce_rows, rows.unbind(0), plan, x)
    else:
        buffer, copy = owned(x, plan, out if here else None)
        operation = issue(
            lane,
            plan,
            lambda communicator: communicator.reduce(buffer, dst, plan.wire_reduce),
            buffer,
            timeout,
            detail=detail,
            shape=x.shape,
            before=copy,
        )
        total = partial(reduced, buffer, plan, x, size)
    if not here:
        return Work((operation,), lambda: None)
    return Work((operation,), lambda: deliver(total().view(x.shape), out))


def start_reduce_scatter(
    lane: Lane, rows: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Row ``rank`` of the reduction of every rank's ``rows`` (n, ...)."""
    plan = plan_for(lane, Op.REDUCE_SCATTER, rows, op)
    size = lane.group.size
    part_shape = rows.shape[1:]
    check_out(out, rows, part_shape)
    wire = encode(physical(rows.reshape(size, -1)), plan)
    wire_op = plan.wire_reduce or op
    if plan.via == "native":
        target = target_for(out, wire, wire.shape[1:])
        start: Start = lambda communicator: communicator.reduce_scatter(  # noqa: E731
            target.view(-1), wire.view(-1), wire_op
        )
        total: Callable[[], torch.Tensor] = partial(reduced, target, plan, rows, size)
    else:
        received = torch.empty_like(wire)
        even = [1] * size
        start = lambda communicator: communicator.all_to_all(received, wire, even, even)  # noqa: E731
        total = partial(_reduce_rows, received.unbind(0), plan, rows, target_for(out, wire, wire.shape[1:]))
    operation = issue(lane, plan, start, wire, timeout, detail=op.value, shape=rows.shape)
    return Work((operation,), lambda: deliver(total().view(part_shape), out))

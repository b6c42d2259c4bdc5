"""all_reduce, reduce and reduce_scatter of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asynccoll.encoding import encode, reduce_chunks
from asynccoll.lane import Lane, Start
from asynccoll.spec import Op, Plan, ReduceOp, Wire
from asynccoll.tensors.common import (
    OFFLOAD_BYTES,
    check_out,
    computed,
    deliver,
    fresh,
    issue,
    owned,
    physical,
    plan_for,
    reduced,
    target_for,
)
from asynccoll.work import Work


def start_all_reduce(
    lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """The reduction of every rank's ``x``, in the shape of ``x``."""
    plan = plan_for(lane, Op.ALL_REDUCE, x, op)
    if (out is x or out is None) and x.layout is torch.strided:
        size_bytes = x.nbytes
        plain = plan.direct and x.is_contiguous()
        if plain and (out is x or size_bytes < OFFLOAD_BYTES) and not lane.group.context.policy.check:
            return _all_reduce_plain(lane, plan, computed(x) if out is x else fresh(x), size_bytes, timeout)
    check_out(out, x, x.shape)
    if x.layout is not torch.strided:
        return _all_reduce_sparse(lane, plan, x, timeout)
    if plan.via != "native":
        return _all_reduce_gathered(lane, plan, x, out, timeout)
    buffer, copy = owned(x, plan, out)
    wire_op = plan.wire_reduce
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_reduce(buffer, wire_op),
        buffer,
        timeout,
        detail=op,
        shape=x.shape,
        before=copy,
    )
    if plan.direct:
        return Work((operation,), partial(deliver, buffer, out))
    size = lane.group.size
    return Work((operation,), lambda: deliver(reduced(buffer, plan, x, size).view(x.shape), out))


def _all_reduce_plain(
    lane: Lane, plan: Plan, buffer: torch.Tensor, size_bytes: int, timeout: float | None
) -> Work[torch.Tensor]:
    """The common cases, with as little around the native call as there can be."""
    wire_op = plan.wire_reduce
    operation = lane.issue(plan.name, lambda comm: comm.all_reduce(buffer, wire_op), size_bytes, timeout)
    return Work((operation,), None, buffer)


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
    return Work((operation,), lambda: deliver(_reduce_rows(rows, plan, x).view(x.shape), out))


def _reduce_rows(
    rows: torch.Tensor, plan: Plan, x: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The local half of a composed reduction: the rows of all ranks, reduced and decoded."""
    op = plan.wire_reduce or ReduceOp.SUM
    if plan.wire is Wire.REAL:  # pairs of reals are only how complex numbers travelled
        total = reduce_chunks(torch.view_as_complex(rows).unbind(0), op)
        return total.div_(len(rows)) if plan.divide else total
    return reduced(reduce_chunks(rows.unbind(0), op, into), plan, x, len(rows))


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
        total: Callable[[], torch.Tensor] = partial(_reduce_rows, rows, plan, x)
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
        total = partial(_reduce_rows, received, plan, rows, target_for(out, wire, wire.shape[1:]))
    operation = issue(lane, plan, start, wire, timeout, detail=op.value, shape=rows.shape)
    return Work((operation,), lambda: deliver(total().view(part_shape), out))

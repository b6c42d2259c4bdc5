"""Whole tensors from rank to rank: broadcast, gathering, and the barrier."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from asynccoll import dispatch
from asynccoll.completion import READY, Completion
from asynccoll.encoding import decode, encode
from asynccoll.errors import UnsupportedOpError
from asynccoll.lane import Lane, Start
from asynccoll.memory import same_memory
from asynccoll.spec import Op, Plan, TensorSpec
from asynccoll.tensors.common import (
    OFFLOAD_BYTES,
    Call,
    check_out,
    copied,
    deliver,
    delivered,
    encoding_again,
    issue,
    owned,
    physical,
    plan_for,
    route_for,
    serves,
    target_for,
)
from asynccoll.tensors.fusing import Fuse, MakeCall
from asynccoll.work import Work

_NOTHING = torch.empty(0)


def start_broadcast(
    lane: Lane, x: torch.Tensor, src: int, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """The ``x`` of ``src``, whose shape every rank's ``x`` has."""
    route = route_for(lane, Op.BROADCAST, x, None, x.numel())
    if (out is x or out is None) and route.plain(x):
        here, size_bytes = lane.group.rank == src, x.nbytes
        if out is x or not here or size_bytes <= OFFLOAD_BYTES:
            buffer = x if out is x else copied(x) if here else x.new_empty(x.shape)
            start: Start = lambda communicator: communicator.broadcast(buffer, src)  # noqa: E731
            return Work((lane.issue(route.estimate, start, size_bytes, timeout),), None, buffer)
    return broadcast_call(lane, x, src, out).begin(lane, timeout)


def broadcast_call(lane: Lane, x: torch.Tensor, src: int, out: torch.Tensor | None) -> Call:
    """The broadcast of ``x`` as one call, with its result in ``out`` or in memory of its own."""
    plan = plan_for(lane, Op.BROADCAST, x)
    check_out(out, x, x.shape)
    fill = refill = None
    if lane.group.rank == src:
        buffer, fill, refill = owned(x, plan, out)
    else:
        like = encode(torch.empty(0, dtype=x.dtype, device=x.device), plan)
        ratio = x.element_size() // like.element_size()
        buffer = target_for(out, like, x.shape if ratio == 1 else (x.numel() * ratio,))
    decoded = lambda: decode(buffer.view(-1), plan, x.dtype, x.device).view(x.shape)  # noqa: E731
    value, finish = delivered(buffer, plan, out, decoded)
    return Call(
        plan,
        lambda communicator: communicator.broadcast(buffer, src),
        buffer,
        finish,
        value,
        shape=x.shape,
        detail=f"src={lane.group.ranks[src]}",
        fill=fill,
        refill=refill,
    )


def broadcast_fuse(lane: Lane, src: int) -> Fuse:
    """The broadcast of many tensors."""
    call: MakeCall = lambda x, out: broadcast_call(lane, x, src, out)  # noqa: E731
    return Fuse("broadcast", call, f"src={lane.group.ranks[src]}")


def start_all_gather(
    lane: Lane,
    x: torch.Tensor,
    out: torch.Tensor | None,
    timeout: float | None,
    shape: tuple[int, ...] | None = None,
) -> Work[torch.Tensor]:
    """Every rank's ``x`` as rows: (n, *x.shape), or as many elements in ``shape``, which ``out`` then has."""
    route = route_for(lane, Op.ALL_GATHER, x, None, x.numel())
    by_rows = (lane.group.size, *x.shape)
    shape = shape or by_rows
    if route.plain(x) and not x.requires_grad and (out is None or serves(out, x, shape)):
        rows = x.new_empty(shape) if out is None else out
        start: Start = lambda communicator: communicator.all_gather(rows.view(-1), x.view(-1))  # noqa: E731
        return Work((lane.issue(route.estimate, start, x.nbytes, timeout),), None, rows)
    check_out(out, x, shape)
    work = all_gather_call(lane, x, out).begin(lane, timeout)
    return work if shape == by_rows else work.map(lambda rows: deliver(rows.view(shape), out))


def all_gather_call(lane: Lane, x: torch.Tensor, out: torch.Tensor | None) -> Call:
    """The rows of every rank's ``x`` as one call, with its result in ``out`` or in memory of its own."""
    plan = plan_for(lane, Op.ALL_GATHER, x)
    size = lane.group.size
    wire = encode(physical(x).reshape(-1), plan)
    target = target_for(out, wire, (size * wire.numel(),))
    shape = (size, *x.shape)
    if plan.direct and (out is None or same_memory(target, out)):
        rows, finish = target.view(shape), None
    else:
        into = out if out is not None and out.is_contiguous() else None
        rows = None
        finish = lambda: deliver(decode(target, plan, x.dtype, x.device).view(shape), into).view(shape)  # noqa: E731
    return Call(
        plan,
        lambda communicator: communicator.all_gather(target, wire),
        wire,
        finish,
        rows,
        shape=x.shape,
        refill=encoding_again(wire, x, plan),
    )


def start_gather(lane: Lane, x: torch.Tensor, dst: int, timeout: float | None) -> Work[torch.Tensor | None]:
    """Every rank's ``x`` as rows (n, *x.shape) on ``dst``, None elsewhere."""
    plan = plan_for(lane, Op.GATHER, x)
    here = lane.group.rank == dst
    wire = encode(physical(x).reshape(-1), plan)
    rows = wire.new_empty((lane.group.size, wire.numel())) if here else None
    parts = list(rows.unbind(0)) if rows is not None else None
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.gather(parts, wire, dst),
        wire,
        timeout,
        detail=f"dst={lane.group.ranks[dst]}",
        shape=x.shape,
    )
    if rows is None:
        return Work((operation,), lambda: None)
    shape = (lane.group.size, *x.shape)
    return Work((operation,), lambda: decode(rows.view(-1), plan, x.dtype, x.device).view(shape))


def start_join(lane: Lane, timeout: float | None) -> Work[int]:
    """The rank that called it last; until then the others' reductions go on with zeros of this one."""
    group = lane.group
    backend = group.context.backend
    if group.size > 1 and not (getattr(backend, "joins", False) and group.is_world):
        where = f"on {backend.name}" if group.is_world else f"in the group of ranks {list(group.ranks)}"
        raise UnsupportedOpError(
            f"join is not supported {where}; horovod has it, in the world. Elsewhere agree on the number "
            "of steps first: await ac.all_reduce(len(batches), op='min')"
        )
    last = torch.full((), group.context.rank, dtype=torch.int32)

    def program(communicator: Any) -> Generator[Completion, None, Completion]:
        if group.size > 1:
            yield communicator.join(last)
        return READY

    operation = lane.run("join", program, timeout=timeout)
    for one in group.lanes():
        one.next_round()
    return Work((operation,), lambda: int(last))


def start_barrier(lane: Lane, timeout: float | None) -> Work[None]:
    """Done once every member has called it."""
    plan: Plan | None = lane.routes.get(Op.BARRIER)
    if plan is None:
        spec = TensorSpec(torch.uint8)
        plan = dispatch.plan(Op.BARRIER, spec, lane.group.topology("cpu"), lane.group.context.policy)
        lane.routes[Op.BARRIER] = plan
    operation = issue(lane, plan, lambda communicator: communicator.barrier(), _NOTHING, timeout)
    return Work((operation,), None)

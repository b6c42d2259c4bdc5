"""Calls that move whole tensors (broadcast, all_gather, gather); also join and the barrier."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from asynccoll.errors import UnsupportedOpError
from asynccoll.order.job import UNCOMPARED
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Operation
from asynccoll.plan import dispatch
from asynccoll.plan.spec import Op, Plan, TensorSpec
from asynccoll.tensors.common import (
    Call,
    check_out,
    delivered,
    encoding_again,
    kept,
    owned,
    route_for,
    sent_as,
    target_for,
    undisturbing,
    wire_like,
)
from asynccoll.tensors.encoding import decode
from asynccoll.tensors.fusing import Fuse, MakeCall
from asynccoll.tensors.nodes import broadcast_by_node, gathered_by_node
from asynccoll.transport.completion import READY, Completion, Promise
from asynccoll.waiting.started import Started

_NOTHING = torch.empty(0, device="cpu")


def broadcast_call(lane: Lane, x: torch.Tensor, src: int, out: torch.Tensor | None) -> Call:
    """Return the call that sends the ``x`` of ``src`` to all ranks.

    The result is in ``out``, or in new memory with the strides of this rank's ``x``.
    """
    route = route_for(lane, Op.BROADCAST, x, None, x.numel())
    plan = route.plan
    check_out(out, x, x.shape)
    out = kept(x, out)
    fill = refill = None
    if lane.group.rank == src:
        buffer, fill, refill = owned(route, x, out)
    else:
        buffer = target_for(out, *wire_like(route, x))
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
        program=broadcast_by_node(lane, buffer, src) if plan.via == "nodes" else None,
    )


def broadcast_fuse(lane: Lane, src: int) -> Fuse:
    """Return the broadcast of many tensors."""
    call: MakeCall = lambda x, out: broadcast_call(lane, x, src, out)  # noqa: E731
    return Fuse("broadcast", call, f"src={lane.group.ranks[src]}", src=src)


def all_gather_call(
    lane: Lane, x: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...] | None = None
) -> Call:
    """Return the call that gathers every rank's ``x`` as rows: (n, *x.shape).

    If ``shape`` is given, the result and ``out`` have that shape, with as many elements.
    """
    route = route_for(lane, Op.ALL_GATHER, x, None, x.numel())
    plan, size = route.plan, lane.group.size
    shape = shape or (size, *x.shape)
    check_out(out, x, shape)
    wire = sent_as(route, x).view(-1)
    target = target_for(undisturbing(out, wire, lane.group.rank), wire, (size * wire.numel(),))
    decoded = lambda: decode(target, plan, x.dtype, x.device).view(shape)  # noqa: E731
    value, finish = delivered(target, plan, out, decoded)
    return Call(
        plan,
        lambda communicator: communicator.all_gather(target, wire),
        wire,
        finish,
        target.view(shape) if value is target else value,
        shape=x.shape,
        refill=None if route.plain(x) else encoding_again(wire, x, plan),
        program=gathered_by_node(lane, target, wire) if plan.via == "nodes" else None,
    )


def gather_call(lane: Lane, x: torch.Tensor, dst: int) -> Call:
    """Return the call that gathers every rank's ``x`` as rows (n, *x.shape) on ``dst``; None elsewhere."""
    route = route_for(lane, Op.GATHER, x, None, x.numel())
    plan = route.plan
    here = lane.group.rank == dst
    wire = sent_as(route, x).view(-1)
    rows = wire.new_empty((lane.group.size, wire.numel())) if here else None
    parts = list(rows.unbind(0)) if rows is not None else None
    shape = (lane.group.size, *x.shape)
    return Call(
        plan,
        lambda communicator: communicator.gather(parts, wire, dst),
        wire,
        None if rows is None else lambda: decode(rows.view(-1), plan, x.dtype, x.device).view(shape),
        shape=x.shape,
        detail=f"dst={lane.group.ranks[dst]}",
        refill=encoding_again(wire, x, plan),
    )


def start_join(lane: Lane, timeout: float | None) -> Started[int]:
    """Start a join; its result is the rank that called it last.

    Until then the other ranks' reductions continue, with zeros for this rank.
    """
    group = lane.group
    backend = lane.world.backend
    if group.size > 1 and not (backend.joins and group.is_world):
        where = f"on {backend.name}" if group.is_world else f"in the group of ranks {list(group.ranks)}"
        raise UnsupportedOpError(
            f"join is not supported {where}; horovod supports it, in the world. Elsewhere agree on the "
            "number of steps first: await ac.all_reduce(len(batches), op='min')"
        )
    last = torch.full((), lane.world.rank, dtype=torch.int32, device="cpu")
    # Horovod treats this rank as joined even in calls that it has issued before and others have not. There it
    # would count twice, and the others' numbers would be left out. So wait for these calls first.
    lanes, rounds = group.lanes(), group.rounds + 1
    before = [_over(operation) for one in lanes for operation in one.outstanding()]

    def program(communicator: Any) -> Generator[Completion, None, Completion]:
        if group.size > 1:
            yield from before
            for one in lanes:
                one.begin_round(rounds)
            yield communicator.join(last)
        return READY

    operation = lane.run("join", program, timeout=timeout, what=UNCOMPARED)
    group.next_round()
    return Started((operation,), lambda: int(last))


def _over(operation: Operation) -> Promise:
    """Return a promise that is settled once ``operation`` is over, even if it fails."""
    promise = Promise()
    operation.add_waker(promise.settle)
    return promise


def start_barrier(lane: Lane, timeout: float | None) -> Started[None]:
    """Start a barrier, which is done once every member has called it."""
    plan: Plan | None = lane.routes.get(Op.BARRIER)
    if plan is None:
        spec = TensorSpec(torch.uint8)
        plan = dispatch.plan(Op.BARRIER, spec, lane.group.topology("cpu"), lane.world.policy)
        lane.routes[Op.BARRIER] = plan
    return Call(plan, lambda communicator: communicator.barrier(), _NOTHING, None).begin(lane, timeout)

"""Collectives of one tensor: plan, encode, issue; decode at the waiter.

Each ``start_*`` function gives a ``Work`` for the whole result, in a canonical layout (ranks are rows).
Nothing here is differentiable (``autograd`` wraps it), validates what the public functions have
validated, or knows which backend runs it. Roots are indices in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch

from asynccoll import dispatch
from asynccoll.backends.waiters import Waiters
from asynccoll.checks import checked, signature
from asynccoll.completion import Completion, Promise
from asynccoll.encoding import decode, encode, reduce_chunks
from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.lane import Lane, Program, Start
from asynccoll.operation import Operation
from asynccoll.spec import Op, Plan, ReduceOp, TensorSpec, Wire, dtype_name
from asynccoll.waiting import in_loop
from asynccoll.work import Work

#: Above this size the copy that a functional result needs would hold the event loop (64 MiB: some
#: 50 ms of page faults), so a thread makes it, while the operation keeps its place in the lane.
OFFLOAD_BYTES = 2 << 20
_copiers = Waiters("asynccoll-copy")


def plan_for(lane: Lane, op: Op, x: torch.Tensor, reduce: ReduceOp | None = None) -> Plan:
    """The plan for ``x``, from the lane's own small cache (a plan does not depend on the shape)."""
    key = (op, reduce, x.dtype, x.device, x.layout, x.is_contiguous())
    plan = lane.plans.get(key)
    if plan is None:
        device = x.device.type
        if device == "meta":
            raise PayloadTypeError(
                f"{op.value} of a meta tensor: it has no data to send; materialise it first, as in "
                "torch.empty_like(x, device='cpu')"
            )
        spec = TensorSpec(x.dtype, (), device, x.is_contiguous(), x.layout is not torch.strided)
        topology = lane.group.topology(device)
        plan = dispatch.plan(op, spec, topology, lane.group.context.policy, reduce)
        lane.plans[key] = plan
    return plan


def issue(
    lane: Lane,
    plan: Plan,
    start: Start,
    x: torch.Tensor,
    timeout: float | None,
    *,
    detail: object = "",
    shape: Sequence[int] | None = None,
    before: Callable[[], object] | None = None,
) -> Operation:
    """Hand one native call to the lane: alone, or behind a big copy or a comparison of signatures."""
    name = plan.name
    size_bytes = x.nbytes
    if before is None and not lane.group.context.policy.check:
        return lane.issue(name, start, size_bytes, timeout)
    program: Program | None = None
    if before is not None:
        program = _after(before, start)
    if lane.group.context.policy.check:
        text = signature(name, dtype_name(x.dtype), shape, str(getattr(detail, "value", detail)))
        program = checked(lane, text, start, program)
    assert program is not None
    return lane.run(name, program, size_bytes, timeout)


def _after(before: Callable[[], object], start: Start) -> Program:
    """``start``, once ``before`` has run in a thread of its own."""

    def program(communicator: Any) -> Generator[Completion, None, Completion]:
        promise = Promise()

        def run() -> None:
            try:
                before()
            except BaseException as error:
                promise.settle(error)
            else:
                promise.settle()

        _copiers.submit(promise, run)
        yield promise
        return start(communicator)

    return program


# Memory


def _physical(x: torch.Tensor) -> torch.Tensor:
    """``x`` without autograd history, lazy conjugation or negation: what memory really holds."""
    x = x.detach()
    if x.is_complex() and x.is_conj():
        x = x.resolve_conj()
    return x.resolve_neg() if x.is_neg() else x


def check_out(out: torch.Tensor | None, x: torch.Tensor, shape: Sequence[int]) -> None:
    """``out`` must be able to hold a result of ``shape`` as it is."""
    if out is None or out is x:
        return
    if not isinstance(out, torch.Tensor):
        raise PayloadTypeError(f"out must be a tensor, got {type(out).__name__}")
    if out.shape != torch.Size(shape) or out.dtype is not x.dtype or out.device != x.device:
        raise InvalidArgumentError(
            f"out is {dtype_name(out.dtype)}{list(out.shape)} on {out.device}; expected "
            f"{dtype_name(x.dtype)}{list(shape)} on {x.device}"
        )


def _target(out: torch.Tensor | None, wire: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Memory for ``shape`` elements of the wire: the caller's ``out`` where it can serve as it is."""
    if out is not None and out.dtype is wire.dtype and out.device == wire.device and out.is_contiguous():
        return out.detach().view(shape)
    return torch.empty(shape, dtype=wire.dtype, device=wire.device)


def deliver(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result; in ``out`` where the caller gave one that could not be used directly."""
    if out is None:
        return result
    if out.data_ptr() != result.data_ptr() or not out.is_contiguous():
        out.detach().copy_(result.view(out.shape))
    return out


def _owned(
    x: torch.Tensor, plan: Plan, out: torch.Tensor | None
) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """A wire tensor that may be overwritten, holding ``x``; and the copy still to make, if it is big."""
    physical = _physical(x)
    wire = encode(physical, plan)
    shared = wire.data_ptr() == physical.data_ptr() and wire.numel() > 0
    if not shared and not (plan.direct and out is not None):
        return wire, None
    buffer = _target(out, wire, wire.shape)
    if buffer.data_ptr() == wire.data_ptr() and wire.numel() > 0:
        return buffer, None
    if buffer.numel() * buffer.element_size() >= OFFLOAD_BYTES and in_loop():
        return buffer, lambda: buffer.copy_(wire)
    return buffer.copy_(wire), None


def _reduced(wire: torch.Tensor, plan: Plan, x: torch.Tensor, size: int) -> torch.Tensor:
    """What came back from a reduction, as ``x`` was: divided if it is an average, decoded."""
    if plan.divide:
        wire.div_(size)
    return decode(wire, plan, x.dtype, x.device)


# Reductions


def start_all_reduce(
    lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """The reduction of every rank's ``x``, in the shape of ``x``."""
    plan = plan_for(lane, Op.ALL_REDUCE, x, op)
    if out is not None:
        check_out(out, x, x.shape)
    if x.layout is not torch.strided:
        return _all_reduce_sparse(lane, plan, x, timeout)
    if plan.via != "native":
        return _all_reduce_gathered(lane, plan, x, out, timeout)
    if out is x and plan.direct and x.is_contiguous():
        buffer, copy = x, None
    else:
        buffer, copy = _owned(x, plan, out)
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
    if buffer is x:
        return Work((operation,), lambda: x)
    if plan.direct:
        return Work((operation,), partial(deliver, buffer, out))
    size = lane.group.size
    return Work(
        (operation,), lambda: deliver(_reduced(buffer, plan, x, size).view(x.shape), out)
    )


def _all_reduce_sparse(
    lane: Lane, plan: Plan, x: torch.Tensor, timeout: float | None
) -> Work[torch.Tensor]:
    buffer = x.detach().coalesce().clone()
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_reduce(buffer, ReduceOp.SUM),
        buffer,
        timeout,
        detail="sum sparse",
        shape=x.shape,
    )
    return Work((operation,), lambda: buffer)


def _all_reduce_gathered(
    lane: Lane, plan: Plan, x: torch.Tensor, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """For reductions that no backend arithmetic has: everybody's data, reduced in rank order."""
    wire = encode(_physical(x), plan)
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
    return Work(
        (operation,), lambda: deliver(_reduce_rows(rows, plan, x).view(x.shape), out)
    )


def _reduce_rows(
    rows: torch.Tensor, plan: Plan, x: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The local half of a composed reduction: the rows of all ranks, reduced and decoded."""
    op = plan.wire_reduce or ReduceOp.SUM
    if plan.wire is Wire.REAL:  # pairs of reals are only how complex numbers travelled
        total = reduce_chunks(torch.view_as_complex(rows).unbind(0), op)
        return total.div_(len(rows)) if plan.divide else total
    return _reduced(reduce_chunks(rows.unbind(0), op, into), plan, x, len(rows))


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
        wire = encode(_physical(x), plan)
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
        buffer, copy = _owned(x, plan, out if here else None)
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
        total = partial(_reduced, buffer, plan, x, size)
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
    wire = encode(_physical(rows.reshape(size, -1)), plan)
    wire_op = plan.wire_reduce or op
    if plan.via == "native":
        target = _target(out, wire, wire.shape[1:])
        start: Start = lambda communicator: communicator.reduce_scatter(  # noqa: E731
            target.view(-1), wire.view(-1), wire_op
        )
        total: Callable[[], torch.Tensor] = partial(_reduced, target, plan, rows, size)
    else:
        received = torch.empty_like(wire)
        even = [1] * size
        start = lambda communicator: communicator.all_to_all(received, wire, even, even)  # noqa: E731
        total = partial(
            _reduce_rows, received, plan, rows, _target(out, wire, wire.shape[1:])
        )
    operation = issue(lane, plan, start, wire, timeout, detail=op.value, shape=rows.shape)
    return Work((operation,), lambda: deliver(total().view(part_shape), out))


# Movement


def start_broadcast(
    lane: Lane, x: torch.Tensor, src: int, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """The ``x`` of ``src``, whose shape every rank's ``x`` has."""
    plan = plan_for(lane, Op.BROADCAST, x)
    check_out(out, x, x.shape)
    copy = None
    if lane.group.rank == src:
        buffer, copy = _owned(x, plan, out)
    else:
        like = encode(torch.empty(0, dtype=x.dtype, device=x.device), plan)
        ratio = x.element_size() // like.element_size()
        buffer = _target(out, like, x.shape if ratio == 1 else (x.numel() * ratio,))
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.broadcast(buffer, src),
        buffer,
        timeout,
        detail=f"src={lane.group.ranks[src]}",
        shape=x.shape,
        before=copy,
    )
    if plan.direct:
        return Work((operation,), lambda: deliver(buffer.view(x.shape), out))
    return Work(
        (operation,),
        lambda: deliver(decode(buffer.view(-1), plan, x.dtype, x.device).view(x.shape), out),
    )


def start_all_gather(
    lane: Lane, x: torch.Tensor, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Every rank's ``x`` as rows: (n, *x.shape)."""
    plan = plan_for(lane, Op.ALL_GATHER, x)
    size = lane.group.size
    wire = encode(_physical(x).reshape(-1), plan)
    target = _target(out, wire, (size * wire.numel(),))
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_gather(target, wire),
        wire,
        timeout,
        shape=x.shape,
    )
    shape = (size, *x.shape)
    if plan.direct:
        return Work((operation,), lambda: target.view(shape))
    return Work((operation,), lambda: decode(target, plan, x.dtype, x.device).view(shape))


def start_gather(
    lane: Lane, x: torch.Tensor, dst: int, timeout: float | None
) -> Work[torch.Tensor | None]:
    """Every rank's ``x`` as rows (n, *x.shape) on ``dst``, None elsewhere."""
    plan = plan_for(lane, Op.GATHER, x)
    here = lane.group.rank == dst
    wire = encode(_physical(x).reshape(-1), plan)
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


def start_all_to_all(
    lane: Lane,
    x: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int] | None,
    timeout: float | None,
    out: torch.Tensor | None = None,
    op: Op = Op.ALL_TO_ALL,
    detail: str = "",
) -> Work[torch.Tensor]:
    """Rows of ``x`` exchanged: ``in_splits[j]`` of them go to rank j. Without ``out_splits`` the
    counts travel first."""
    plan = plan_for(lane, op, x)
    row_shape = x.shape[1:]
    wire = encode(_physical(x).reshape(x.shape[0], row_shape.numel()), plan)
    if out_splits is None:
        return _all_to_all_counted(lane, plan, x, wire, in_splits, timeout)
    rows = sum(out_splits)
    check_out(out, x, (rows, *row_shape))
    alias = out is not None and out.data_ptr() == wire.data_ptr()
    received = _target(None if alias else out, wire, (rows, wire.shape[1]))
    operation = issue(
        lane,
        plan,
        lambda communicator: communicator.all_to_all(received, wire, out_splits, in_splits),
        wire,
        timeout,
        detail=detail or "even" if len(set(in_splits)) == 1 else detail,
        shape=x.shape[1:],
    )
    shape = (rows, *row_shape)
    return Work(
        (operation,), lambda: deliver(decode(received, plan, x.dtype, x.device).view(shape), out)
    )


def _all_to_all_counted(
    lane: Lane,
    plan: Plan,
    x: torch.Tensor,
    wire: torch.Tensor,
    in_splits: Sequence[int],
    timeout: float | None,
) -> Work[torch.Tensor]:
    received: list[torch.Tensor] = []
    ones = [1] * lane.group.size

    def counted(communicator: Any) -> Generator[Completion, None, Completion]:
        sent = torch.tensor(in_splits, dtype=torch.int64)
        counts = torch.empty_like(sent)
        yield communicator.all_to_all(counts, sent, ones, ones)
        out_splits = counts.tolist()
        received.append(wire.new_empty((sum(out_splits), wire.shape[1])))
        done: Completion = communicator.all_to_all(received[0], wire, out_splits, list(in_splits))
        return done

    program: Program = counted
    if lane.group.context.policy.check:
        text = signature(plan.name, dtype_name(x.dtype), x.shape[1:], "counted")
        program = checked(lane, text, program=counted)
    operation = lane.run(plan.name, program, wire.numel() * wire.element_size(), timeout)
    return Work(
        (operation,),
        lambda: decode(received[0], plan, x.dtype, x.device).view(-1, *x.shape[1:])
        if x.shape[1:].numel()
        else x.new_empty((received[0].shape[0], *x.shape[1:])),
    )


def start_permute(
    lane: Lane,
    x: torch.Tensor,
    to: int | None,
    source: int | None,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[torch.Tensor]:
    """``x`` goes to ``to``, the ``x`` of ``source`` comes here; zeros if nobody sends."""
    count = x.numel()
    size = lane.group.size
    check_out(out, x, x.shape)
    flat = x.reshape(-1)
    work = start_all_to_all(
        lane,
        flat if to is not None else flat[:0],
        [count if index == to else 0 for index in range(size)],
        [count if index == source else 0 for index in range(size)],
        timeout,
        op=Op.PERMUTE,
        detail=f"of {list(x.shape)}",
    )
    if source is None:
        return work.map(lambda _: deliver(torch.zeros_like(x, requires_grad=False), out))
    return work.map(lambda received: deliver(received.view(x.shape), out))


def start_send(
    lane: Lane, x: torch.Tensor, dst: int, tag: int, timeout: float | None
) -> Work[None]:
    """``x`` to ``dst``; done when the receiver has taken it."""
    plan = plan_for(lane, Op.SEND, x)
    wire = encode(_physical(x), plan)
    operation = lane.issue(
        "send",
        lambda communicator: communicator.send(wire, dst, tag),
        wire.numel() * wire.element_size(),
        timeout,
        stream=("send", dst, tag),
    )
    return Work((operation,), lambda: None)


def start_recv(
    lane: Lane,
    like: torch.Tensor,
    src: int,
    tag: int,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[torch.Tensor]:
    """A tensor shaped as ``like`` from ``src``."""
    plan = plan_for(lane, Op.RECV, like)
    check_out(out, like, like.shape)
    probe = encode(torch.empty(0, dtype=like.dtype, device=like.device), plan)
    count = like.numel() * like.element_size() // probe.element_size()
    buffer = _target(out, probe, (count,))
    operation = lane.issue(
        "recv",
        lambda communicator: communicator.recv(buffer, src, tag),
        count * probe.element_size(),
        timeout,
        stream=("recv", src, tag),
    )
    return Work(
        (operation,),
        lambda: deliver(decode(buffer, plan, like.dtype, like.device).view(like.shape), out),
    )


def start_barrier(lane: Lane, timeout: float | None) -> Work[None]:
    """Done once every member has called it."""
    spec = TensorSpec(torch.uint8)
    plan = dispatch.plan(Op.BARRIER, spec, lane.group.topology("cpu"), lane.group.context.policy)
    operation = issue(
        lane, plan, lambda communicator: communicator.barrier(), torch.empty(0), timeout
    )
    return Work((operation,), lambda: None)



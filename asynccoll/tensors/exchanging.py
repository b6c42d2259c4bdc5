"""Rows of one tensor exchanged between ranks: all_to_all and permute."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from asynccoll.checks import checked, signature
from asynccoll.completion import Completion
from asynccoll.encoding import decode, encode
from asynccoll.lane import Lane, Program, Start
from asynccoll.memory import may_overlap
from asynccoll.spec import Op, dtype_name
from asynccoll.tensors.common import (
    Call,
    check_out,
    deliver,
    encoding_again,
    physical,
    plan_for,
    route_for,
    serves,
    target_for,
)
from asynccoll.work import Work


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
    """Rows of ``x`` exchanged: ``in_splits[j]`` of them go to rank j.

    Without ``out_splits`` the counts travel first.
    """
    if out_splits is None:
        return _all_to_all_counted(lane, x, in_splits, timeout)
    numel = x.numel()
    route = route_for(lane, op, x, None, numel)
    if numel and route.plain(x) and not x.requires_grad:
        # The common case, with as little around the native call as there can be.
        shape = (sum(out_splits), *x.shape[1:])
        if out is None or serves(out, x, shape):
            received = x.new_empty(shape) if out is None else out
            start: Start = lambda communicator: communicator.all_to_all(received, x, out_splits, in_splits)  # noqa: E731
            return Work((lane.issue(route.estimate, start, x.nbytes, timeout),), None, received)
    return all_to_all_call(lane, x, in_splits, out_splits, out, op, detail).begin(lane, timeout)


def all_to_all_call(
    lane: Lane,
    x: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    out: torch.Tensor | None = None,
    op: Op = Op.ALL_TO_ALL,
    detail: str = "",
) -> Call:
    """The exchange as one call, with its result in ``out`` or in memory of its own."""
    plan = plan_for(lane, op, x)
    wire = encode(physical(x).reshape(x.shape[0], x.shape[1:].numel()), plan)
    shape = (sum(out_splits), *x.shape[1:])
    check_out(out, x, shape)
    shared = out is not None and out.device == wire.device and may_overlap(out, wire)
    received = target_for(None if shared else out, wire, (shape[0], wire.shape[1]))
    return Call(
        plan,
        lambda communicator: communicator.all_to_all(received, wire, out_splits, in_splits),
        wire,
        lambda: deliver(decode(received, plan, x.dtype, x.device).view(shape), out),
        shape=x.shape[1:],
        detail=detail or "even" if len(set(in_splits)) == 1 else detail,
        refill=encoding_again(wire, x, plan),
    )


def _all_to_all_counted(
    lane: Lane, x: torch.Tensor, in_splits: Sequence[int], timeout: float | None
) -> Work[torch.Tensor]:
    plan = plan_for(lane, Op.ALL_TO_ALL, x)
    wire = encode(physical(x).reshape(x.shape[0], x.shape[1:].numel()), plan)
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
        lambda: (
            decode(received[0], plan, x.dtype, x.device).view(-1, *x.shape[1:])
            if x.shape[1:].numel()
            else x.new_empty((received[0].shape[0], *x.shape[1:]))
        ),
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

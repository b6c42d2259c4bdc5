"""Rows of one tensor exchanged between ranks: all_to_all and permute."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from asynccoll.memory.aliasing import may_overlap
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import Op
from asynccoll.tensors.common import (
    Call,
    Route,
    check_out,
    deliver,
    delivered,
    encoding_again,
    kept,
    route_for,
    sent_as,
    target_for,
)
from asynccoll.tensors.encoding import decode
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion


def all_to_all_call(
    lane: Lane,
    x: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int] | None,
    out: torch.Tensor | None = None,
    op: Op = Op.ALL_TO_ALL,
    detail: str = "",
) -> Call:
    """Rows of ``x`` exchanged: ``in_splits[j]`` of them go to rank j; in ``out`` or in memory of its own.

    Without ``out_splits`` the counts are sent first.
    """
    route = route_for(lane, op, x, None, x.numel())
    if out_splits is None:
        return _counted(lane, route, x, in_splits)
    plan = route.plan
    wire = _rows(route, x)
    shape = (sum(out_splits), *x.shape[1:])
    check_out(out, x, shape)
    shared = out is not None and out.device == wire.device and may_overlap(out, wire)
    received = target_for(None if shared else out, wire, (shape[0], *wire.shape[1:]))
    decoded = lambda: decode(received, plan, x.dtype, x.device).view(shape)  # noqa: E731
    value, finish = delivered(received, plan, out, decoded)
    return Call(
        plan,
        lambda communicator: communicator.all_to_all(received, wire, out_splits, in_splits),
        wire,
        finish,
        received.view(shape) if value is received else value,
        shape=x.shape[1:],
        detail=detail,
        refill=encoding_again(wire, x, plan),
    )


def _rows(route: Route, x: torch.Tensor) -> torch.Tensor:
    """``x`` as it is sent, its rows still apart."""
    if route.plain(x) and x.dim() > 1:
        return sent_as(route, x)
    return sent_as(route, x.reshape(x.shape[0], x.shape[1:].numel()))


def _counted(lane: Lane, route: Route, x: torch.Tensor, in_splits: Sequence[int]) -> Call:
    plan = route.plan
    wire = sent_as(route, x.reshape(x.shape[0], x.shape[1:].numel()))
    received: list[torch.Tensor] = []
    ones = [1] * lane.group.size

    def counted(communicator: Communicator) -> Generator[Completion, None, Completion]:
        sent = torch.tensor(in_splits, dtype=torch.int64, device="cpu")
        counts = torch.empty_like(sent)
        yield communicator.all_to_all(counts, sent, ones, ones)
        out_splits = counts.tolist()
        received.append(wire.new_empty((sum(out_splits), wire.shape[1])))
        done: Completion = communicator.all_to_all(received[0], wire, out_splits, list(in_splits))
        return done

    def result() -> torch.Tensor:
        shape = (received[0].shape[0], *x.shape[1:])
        if not x.shape[1:].numel():
            return x.new_empty(shape)
        return decode(received[0], plan, x.dtype, x.device).view(shape)

    return Call(plan, None, wire, result, shape=x.shape[1:], detail="counted", program=counted)


def permute_call(
    lane: Lane, x: torch.Tensor, to: int | None, source: int | None, out: torch.Tensor | None
) -> Call:
    """``x`` goes to ``to``, the ``x`` of ``source`` comes here; zeros if nobody sends."""
    count = x.numel()
    size = lane.group.size
    check_out(out, x, x.shape)
    into = kept(x, out)
    flat = x.reshape(-1)
    call = all_to_all_call(
        lane,
        flat if to is not None else flat[:0],
        [count if index == to else 0 for index in range(size)],
        [count if index == source else 0 for index in range(size)],
        op=Op.PERMUTE,
        detail=f"of {list(x.shape)}",
    )
    if source is None:
        return call.then(lambda _: deliver(torch.zeros_like(x, requires_grad=False), out))
    return call.then(lambda received: deliver(received.view(x.shape), into))

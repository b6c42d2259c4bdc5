"""One tensor, or its rows, exchanged between ranks: all_to_all, permute, send and recv."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch

from asynccoll.errors import AsyncCollError
from asynccoll.health.checks import misfit
from asynccoll.host.call_site import Spot, site
from asynccoll.host.endings import in_full
from asynccoll.memory.aliasing import may_overlap
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Estimate
from asynccoll.plan.spec import Op
from asynccoll.tensors.common import (
    Call,
    Route,
    check_out,
    deliver,
    delivered,
    encoding_again,
    kept,
    physical,
    plan_for,
    route_for,
    sent_as,
    target_for,
)
from asynccoll.tensors.encoding import decode, encode
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import READY, Completion, Promise
from asynccoll.waiting.started import Started


def all_to_all_call(
    lane: Lane,
    x: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int] | None,
    out: torch.Tensor | None = None,
    op: Op = Op.ALL_TO_ALL,
    detail: str = "",
    *,
    even: bool = False,
) -> Call:
    """Return the call that sends ``in_splits[j]`` rows of ``x`` to rank j, into ``out`` or new memory.

    Without ``out_splits`` the counts are sent first. They are also sent first, to be compared, if on a
    mismatch the backend would abort the process or return uninitialized memory. That is not needed if the
    user has passed no split sizes (``even``): then the shape has to be the same on all ranks.
    """
    route = route_for(lane, op, x, None, x.numel())
    if out_splits is None:
        return _counted(route, x, in_splits)
    plan = route.plan
    wire = _rows(route, x)
    shape = (sum(out_splits), *x.shape[1:])
    check_out(out, x, shape)
    shared = out is not None and out.device == wire.device and may_overlap(out, wire)
    received = target_for(None if shared else out, wire, (shape[0], *wire.shape[1:]))
    decoded = lambda: decode(received, plan, x.dtype, x.device).view(shape)  # noqa: E731
    value, finish = delivered(received, plan, out, decoded)

    def start(communicator: Communicator) -> Completion:
        return communicator.all_to_all(received, wire, out_splits, in_splits)

    def compare(place: int, spot: Spot, communicator: Communicator) -> Generator[Completion, None, None]:
        counts = yield from _counts(communicator, in_splits)
        _check_fits(lane, counts, out_splits, spot, place)

    given = op is Op.ALL_TO_ALL and not even and _wants_counts(lane, wire)
    return Call(
        plan,
        start,
        wire,
        finish,
        received.view(shape) if value is received else value,
        shape=x.shape if even else x.shape[1:],
        detail=detail,
        refill=encoding_again(wire, x, plan),
        ahead=compare if given else None,
    )


def _wants_counts(lane: Lane, wire: torch.Tensor) -> bool:
    """Whether to compare counts first, since a mismatch would be noticed too late.

    Not on a device, where this would block the host.
    """
    if lane.group.size == 1 or wire.device.type != "cpu" or not lane.world.checks_order:
        return False
    return not lane.group.topology("cpu").capabilities.compares_splits


def _counts(communicator: Communicator, in_splits: Sequence[int]) -> Generator[Completion, None, list[int]]:
    """Exchange the counts, and return how many rows each rank sends to this one."""
    sent = torch.tensor(in_splits, dtype=torch.int64, device="cpu")
    counts = torch.empty_like(sent)
    ones = [1] * len(in_splits)
    yield communicator.all_to_all(counts, sent, ones, ones)
    return counts.tolist()


def _check_fits(lane: Lane, counts: Sequence[int], out_splits: Sequence[int], spot: Spot, place: int) -> None:
    for rank, sent, expected in zip(lane.group.ranks, counts, out_splits, strict=True):
        if sent != expected:
            lines = "", str(spot.place)
            error = misfit(lane, (rank, lane.world.rank), sent, expected, lines, place)
            error.alone = True
            raise error


def _rows(route: Route, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as it is sent, with its rows still separate."""
    if route.plain(x) and x.dim() > 1:
        return sent_as(route, x)
    return sent_as(route, x.reshape(x.shape[0], x.shape[1:].numel()))


def _counted(route: Route, x: torch.Tensor, in_splits: Sequence[int]) -> Call:
    plan = route.plan
    wire = sent_as(route, x.reshape(x.shape[0], x.shape[1:].numel()))
    received: list[torch.Tensor] = []

    def counted(communicator: Communicator) -> Generator[Completion, None, Completion]:
        out_splits = yield from _counts(communicator, in_splits)
        received.append(wire.new_empty((sum(out_splits), wire.shape[1])))
        return communicator.all_to_all(received[0], wire, out_splits, list(in_splits))

    def result() -> torch.Tensor:
        shape = (received[0].shape[0], *x.shape[1:])
        if not x.shape[1:].numel():
            return x.new_empty(shape)
        return decode(received[0], plan, x.dtype, x.device).view(shape)

    return Call(plan, None, wire, result, shape=x.shape[1:], detail="counted", program=counted)


def permute_call(
    lane: Lane, x: torch.Tensor, pairs: Sequence[tuple[int, int]], out: torch.Tensor | None
) -> Call:
    """Return the call that sends ``x`` along ``pairs`` (source, target), which are indices in the group.

    Its result is zeros if no rank sends to this one.
    """
    count = x.numel()
    size, me = lane.group.size, lane.group.rank
    to = next((target for source, target in pairs if source == me), None)
    source = next((source for source, target in pairs if target == me), None)
    check_out(out, x, x.shape)
    into = kept(x, out)
    flat = x.reshape(-1)
    call = all_to_all_call(
        lane,
        flat if to is not None else flat[:0],
        [count if index == to else 0 for index in range(size)],
        [count if index == source else 0 for index in range(size)],
        op=Op.PERMUTE,
        detail=f"along {list(pairs)} of {list(x.shape)}",
    )
    if source is None:
        return call.then(lambda _: deliver(torch.zeros_like(x, requires_grad=False), out))
    return call.then(lambda received: deliver(received.view(x.shape), into))


def start_send(lane: Lane, x: torch.Tensor, dst: int, tag: int, timeout: float | None) -> Started[None]:
    """Send ``x`` to ``dst``; done once the receiver has taken it."""
    plan = plan_for(lane, Op.SEND, x)
    wire = encode(physical(x), plan)
    size_bytes = wire.numel() * wire.element_size()
    operation = lane.issue(
        lane.estimate("send", size_bytes),
        lambda communicator: communicator.send(wire, dst, tag),
        size_bytes,
        timeout,
        stream=("send", dst, tag),
    )
    return Started((operation,))


def start_recv(
    lane: Lane,
    like: torch.Tensor,
    src: int,
    tag: int,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[torch.Tensor]:
    """Receive a tensor shaped like ``like`` from ``src``."""
    plan = plan_for(lane, Op.RECV, like)
    check_out(out, like, like.shape)
    probe = encode(torch.empty(0, dtype=like.dtype, device=like.device), plan)
    count = like.numel() * like.element_size() // probe.element_size()
    buffer = target_for(out, probe, (count,))
    size_bytes = count * probe.element_size()
    operation = lane.issue(
        lane.estimate("recv", size_bytes),
        lambda communicator: _received(lane, communicator, buffer, src, tag),
        size_bytes,
        timeout,
        stream=("recv", src, tag),
    )
    return Started(
        (operation,),
        lambda: deliver(decode(buffer, plan, like.dtype, like.device).view(like.shape), out),
    )


def _received(lane: Lane, communicator: Communicator, buffer: torch.Tensor, src: int, tag: int) -> Completion:
    """Post the receive; if the second piece of an earlier message has yet to be requested, after that."""

    def ask(asked: Promise) -> Completion:
        completion = communicator.recv(buffer, src, tag)
        asked.settle()
        return completion

    return lane.turns.take((src, tag), ask) if lane.turns else communicator.recv(buffer, src, tag)


def refuse_message(lane: Lane, name: str, peer: int, tag: int, error: BaseException) -> None:
    """Handle a refused send or recv: in place of a send, fail the receiver's side, if it can be notified.

    A refused recv has taken nothing: the message is left for the next recv.
    """
    role, _, _ = name.partition("_")
    reason = in_full(error)
    if role == "recv":
        lane.records.refused(name, 0, tag, peer, reason)
        return
    line = site().place
    why = f"rank {lane.world.rank} refused its side ({line}): {reason} (a refused send counts as a message)"

    def start(communicator: Communicator) -> Completion:
        communicator.refuse(peer, tag, why)
        return READY

    with contextlib.suppress(AsyncCollError):  # the lane is broken, or another task's: nothing was sent
        lane.issue(Estimate(name), start, stream=(role, peer, tag)).refused(reason)

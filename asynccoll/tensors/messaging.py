"""send and recv of one tensor, and what a refused one means for the peer."""

from __future__ import annotations

import contextlib

import torch

from asynccoll.errors import AsyncCollError
from asynccoll.host.call_site import site
from asynccoll.host.endings import in_full
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Estimate
from asynccoll.plan.spec import Op
from asynccoll.tensors.common import check_out, deliver, physical, plan_for, target_for
from asynccoll.tensors.encoding import decode, encode
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import READY, Completion, Promise
from asynccoll.waiting.started import Started


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

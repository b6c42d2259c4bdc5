"""broadcast and scatter of whatever a user passes."""

from __future__ import annotations

from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.memory.plain import plain_tensor
from asynccoll.order.lane import Lane
from asynccoll.payload.common import (
    check_filled,
    check_sendable,
    message_kind,
    no_gradient,
    no_out,
    over_tree,
)
from asynccoll.payload.messages import (
    broadcast_message,
    scatter_messages,
)
from asynccoll.payload.values import as_number, from_message, to_message
from asynccoll.plan.spec import Op
from asynccoll.plan.trees import flatten, is_tree
from asynccoll.tensors import autograd
from asynccoll.waiting.started import Started


def broadcast(
    lane: Lane,
    x: Any,
    src: int,
    safe_mode: bool,
    out: Any,
    timeout: float | None,
) -> Started[Any]:
    index = lane.group.index(src, "src")
    if safe_mode:
        no_out("broadcast(safe_mode=True)", out)
        return _broadcast_anything(lane, x, index, timeout)
    if isinstance(x, torch.Tensor):
        x = plain_tensor("broadcast", x)
        check_filled("broadcast", out, x)
        return autograd.broadcast(lane, x, index, out, timeout)
    x = as_number(x)
    if is_tree(x):
        return over_tree(
            lane,
            "broadcast",
            x,
            lambda xs, outs: autograd.fused(lane, tensors.broadcast_fuse(lane, index), xs, outs, timeout),
            lambda leaf: broadcast(lane, leaf, src, False, None, timeout),
            lambda leaf: check_sendable(lane, Op.BROADCAST, leaf),
            out=out,
            alike=True,
        )
    no_out("broadcast", out)
    kind = message_kind("broadcast", x)
    message = to_message(x) if lane.group.rank == index else None
    device = lane.world.device
    return broadcast_message(
        lane,
        "broadcast",
        message,
        index,
        timeout,
        then=lambda found: from_message(found, device),
        detail=f"{kind} src={src}",
    )


def _broadcast_anything(lane: Lane, x: Any, src: int, timeout: float | None) -> Started[Any]:
    """Others may pass anything: what is sent describes itself, also the shape of a tree."""
    from asynccoll.payload.codecs import SAFE

    here = lane.group.rank == src
    x = plain_tensor("broadcast", x) if here and isinstance(x, torch.Tensor) else as_number(x)
    recorded = flatten(x)[0] if here else []  # what the others pass is ignored
    message = to_message(x, SAFE if is_tree(x) else None) if here else None
    device = lane.world.device
    started = broadcast_message(
        lane,
        "broadcast",
        message,
        src,
        timeout,
        then=lambda found: from_message(found, device, SAFE),
        detail=f"safe src={src}",
    )
    return no_gradient(started, recorded, "broadcast(safe_mode=True)", "broadcast")


def scatter(
    lane: Lane, x: Any, src: int, out: torch.Tensor | None, timeout: float | None
) -> Started[torch.Tensor]:
    size = lane.group.size
    index = lane.group.index(src, "src")
    check_filled("scatter", out)
    messages = None
    parts: list[torch.Tensor] = []
    if lane.group.rank == index:
        parts = scatter_parts(x, size)
        messages = [to_message(plain_tensor("scatter", part)) for part in parts]
    elif x is not None:
        raise InvalidArgumentError(
            f"scatter: only src={src} passes the tensors; pass None on the others, got a {type(x).__name__}"
        )
    if out is not None:
        autograd.records("scatter", parts, (out,))
    device = lane.world.device
    received: Started[Any] = scatter_messages(
        lane,
        "scatter",
        messages,
        index,
        timeout,
        then=lambda message: from_message(message, device),
        detail=f"src={src}",
    )
    if out is not None:
        return received.then(lambda part: _into(part, out))
    return no_gradient(received, parts, "scatter", "all_to_all")


def _into(part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    tensors.check_out(out, part, part.shape)
    return out.copy_(part)


def scatter_parts(x: Any, size: int) -> list[torch.Tensor]:
    """One tensor for each rank, from a list of them or from one to be cut along dim 0."""
    if isinstance(x, torch.Tensor):
        x = plain_tensor("scatter", x)
        if x.dim() == 0 or x.shape[0] % size:
            raise InvalidArgumentError(
                f"scatter: a tensor of shape {list(x.shape)} cannot be cut into {size} equal parts along "
                f"dim 0; pass a list of {size} tensors, or one whose dim 0 divides by {size}"
            )
        return list(x.chunk(size)) if x.shape[0] else [x] * size
    if not isinstance(x, (list, tuple)):
        raise _not_scattered(f"a {type(x).__name__}", size)
    others = sorted({type(part).__name__ for part in x if not isinstance(part, torch.Tensor)})
    if others:
        raise _not_scattered(f"a {type(x).__name__} with {', '.join(others)} in it", size)
    if len(x) != size:
        raise InvalidArgumentError(
            f"scatter: got {len(x)} tensors for {size} ranks; pass one for each rank of the group"
        )
    return list(x)


def _not_scattered(got: str, size: int) -> PayloadTypeError:
    return PayloadTypeError(
        f"scatter got {got}; expected a list of {size} tensors (or one to cut along dim 0) on src; other "
        "objects by scatter_object"
    )

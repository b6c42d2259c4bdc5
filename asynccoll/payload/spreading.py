"""broadcast and scatter of whatever a user passes."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.host.misfits import named_type
from asynccoll.memory.plain import plain_tensor
from asynccoll.order.lane import Lane
from asynccoll.payload.common import (
    check_filled,
    check_sendable,
    message_kinds,
    no_gradient,
    no_out,
    over_tree,
    values_of,
)
from asynccoll.payload.messages import (
    broadcast_message,
    scatter_messages,
)
from asynccoll.payload.parts import part_message, part_of, parts_of, tensors_of
from asynccoll.payload.values import as_number, from_message, to_message, values_message
from asynccoll.plan.spec import Op
from asynccoll.plan.trees import flatten, is_tree
from asynccoll.tensors import autograd
from asynccoll.waiting.started import Started


def broadcast(
    lane: Lane,
    x: object,
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
            lambda values: _broadcast_values(lane, values, src, index, timeout),
            lambda leaf: check_sendable(lane, Op.BROADCAST, leaf),
            out=out,
            alike=True,
        )
    no_out("broadcast", out)
    return _broadcast_values(lane, [x], src, index, timeout).then(itemgetter(0))


def _broadcast_values(
    lane: Lane, values: list[object], src: int, index: int, timeout: float | None
) -> Started[list[Any]]:
    kinds = message_kinds("broadcast", values)
    message = values_message(values) if lane.group.rank == index else None
    return broadcast_message(
        lane,
        "broadcast",
        message,
        index,
        timeout,
        then=lambda found: values_of(lane, [found])[0],
        detail=f"{kinds} src={src}",
    )


def _broadcast_anything(lane: Lane, x: object, src: int, timeout: float | None) -> Started[object]:
    """Broadcast a message that says what the payload is, a tree's structure too.

    So the ranks other than ``src`` may pass anything.
    """
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
    lane: Lane, x: object, src: int, out: torch.Tensor | None, timeout: float | None
) -> Started[object]:
    size = lane.group.size
    index = lane.group.index(src, "src")
    check_filled("scatter", out)
    messages = None
    parts: list[object] = []
    if lane.group.rank == index:
        parts = scatter_parts(x, size)
        messages = [part_message(part) for part in parts]
    elif x is not None:
        raise InvalidArgumentError(
            f"scatter: only src={src} passes what is scattered; pass None on the others, got a "
            f"{type(x).__name__}"
        )
    recorded = tensors_of(parts)
    if out is not None:
        autograd.records("scatter", recorded, (out,))
    device = lane.world.device
    received: Started[object] = scatter_messages(
        lane,
        "scatter",
        messages,
        index,
        timeout,
        then=lambda message: part_of(message, device),
        detail=f"src={src}",
    )
    if out is not None:
        return received.then(lambda part: _into(part, out))
    if not isinstance(x, torch.Tensor):
        received.leaves = recorded
    return no_gradient(received, recorded, "scatter", "all_to_all")


def _into(part: object, out: torch.Tensor) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        raise InvalidArgumentError(f"scatter: out= is for tensors, and src sent a {type(part).__name__}")
    tensors.check_out(out, part, part.shape)
    return out.copy_(part)


def scatter_parts(x: object, size: int) -> list[object]:
    """Return one part for each rank, from a list of parts or from one tensor that is cut along dim 0."""
    if isinstance(x, torch.Tensor):
        x = plain_tensor("scatter", x)
        if x.dim() == 0 or x.shape[0] % size:
            raise InvalidArgumentError(
                f"scatter: a tensor of shape {list(x.shape)} cannot be cut into {size} equal parts along "
                f"dim 0; pass a list of {size} tensors, or one whose dim 0 is divisible by {size}"
            )
        return list(x.chunk(size)) if x.shape[0] else [x] * size
    if not isinstance(x, (list, tuple)):
        raise PayloadTypeError(
            f"scatter got {named_type(x)}; expected on src a list of {size}, one for each rank, or a "
            "tensor to cut along dim 0"
        )
    return parts_of("scatter", x, size)

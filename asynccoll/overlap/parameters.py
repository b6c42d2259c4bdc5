"""What the ranks start from: the parameters and buffers of one of them, on all."""

from __future__ import annotations

from typing import Any

import torch

from asynccoll.ops import broadcast
from asynccoll.work import Work

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    model: torch.nn.Module,
    *,
    src: int = 0,
    group: Any = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[None]:
    """Parameters and buffers of ``model`` as ``src`` has them, on every rank: before training begins.

    Once awaited (until then the model must be left alone) they are overwritten in place. They travel
    in few large messages.
    """
    tensors = [x.detach() for x in (*model.parameters(), *model.buffers())]
    received = broadcast(tensors, src=src, group=group, lane=lane, timeout=timeout)
    return received.map(lambda values: _overwrite(tensors, values))


def _overwrite(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value)

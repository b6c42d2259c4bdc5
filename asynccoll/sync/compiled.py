"""ignite's collectives of tensors inside ``torch.compile``: traced as those of ``ac`` are, with gradients.

As outside of a graph, ``all_reduce`` and ``broadcast`` overwrite the tensor; one that autograd is recording
is left alone, since backward may need its old value.
"""

from __future__ import annotations

from typing import cast

import torch

import asynccoll as ac
from asynccoll.errors import InvalidArgumentError
from asynccoll.ops.compiled import constant_in_graphs, traced_at
from asynccoll.plan.spec import ReduceOpLike
from asynccoll.sync.models import SERIAL
from asynccoll.sync.world import model
from asynccoll.world.group import GroupLike

__all__ = ["all_gather", "all_reduce", "broadcast"]


@constant_in_graphs
def _alone() -> bool:
    alone = model() is SERIAL
    if alone:
        traced_at(0, 1)
    return alone


@constant_in_graphs
def _reduction(op: str) -> ReduceOpLike:
    """Return our name for ignite's ``op``."""
    ours = model().ops.get(op)
    if ours is None:
        raise InvalidArgumentError(f"Unsupported reduction operation: '{op}'")
    return cast("ReduceOpLike", str(ours))


def all_reduce(tensor: torch.Tensor, op: str, group: GroupLike) -> torch.Tensor:
    if _alone():
        return tensor
    return _overwritten(tensor, ac.all_reduce(tensor, op=_reduction(op), group=group).wait())


def broadcast(tensor: torch.Tensor, src: int, safe_mode: bool) -> torch.Tensor:
    if _alone():
        return tensor
    return _overwritten(tensor, ac.broadcast(tensor, src=src, safe_mode=safe_mode).wait())


def all_gather(tensor: torch.Tensor, group: GroupLike) -> torch.Tensor:
    if _alone():
        return tensor
    return ac.all_gather(tensor, group=group).wait()


def _overwritten(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return result
    return tensor.copy_(result)

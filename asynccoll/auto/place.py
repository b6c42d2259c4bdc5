"""What the auto helpers must know of the world: a value, so that they serve ``ac`` and ``sync`` alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from asynccoll.runtime.process import (
    backend,
    device,
    get_local_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
)

__all__ = ["Place", "here"]

_log = logging.getLogger("asynccoll.auto")


@dataclass(frozen=True)
class Place:
    """This rank in its world, on which backend (None for a world of one) and device."""

    rank: int
    world_size: int
    local_rank: int
    nproc_per_node: int
    backend: str | None
    device: torch.device
    log: logging.Logger = _log


def here() -> Place:
    """The place of the current context."""
    name = backend()
    return Place(
        get_rank(),
        get_world_size(),
        get_local_rank(),
        get_nproc_per_node(),
        None if name == "serial" else name,
        device(),
    )

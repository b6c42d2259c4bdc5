"""What the auto helpers must know about the world, as a value, so that they serve ``ac`` and ``sync``."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from asynccoll.backends.api import Training
from asynccoll.runtime.process import (
    device,
    get_local_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    known,
)

_log = logging.getLogger("asynccoll.auto")


@dataclass(frozen=True)
class Place:
    """This rank and its world, the backend and device, and how models are trained there."""

    rank: int
    world_size: int
    local_rank: int
    nproc_per_node: int
    backend: str
    device: torch.device
    training: Training
    log: logging.Logger = _log


def here() -> Place:
    """Return the place of the current context."""
    used = known().backend
    return Place(
        get_rank(),
        get_world_size(),
        get_local_rank(),
        get_nproc_per_node(),
        used.name,
        device(),
        used.training,
    )

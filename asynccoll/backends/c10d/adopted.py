"""Adopting a default group that the user made with torch: our part of its store, and this rank's place."""

from __future__ import annotations

import os

import torch.distributed as dist

from asynccoll.backends.api import LaunchInfo, detect
from asynccoll.errors import LaunchEnvironmentError

__all__ = ["matching_launch", "own_part"]


def own_part(store: dist.Store, rank: int) -> dist.Store:
    """Return a part of the store of the user's group that no earlier world of ours on this group has used.

    No rank waits for another: each counts the worlds that it has begun, and all ranks begin the same ones.
    """
    life = store.add(f"asynccoll/lives/{rank}", 1)
    return dist.PrefixStore(f"asynccoll/{life}", store)


def matching_launch(rank: int, world_size: int) -> LaunchInfo | None:
    """Return what the launcher says, or None if its rank and size are not those of the user's group."""
    try:
        launch = detect(os.environ)
    except LaunchEnvironmentError:
        return None
    return launch if (launch.rank, launch.world_size) == (rank, world_size) else None

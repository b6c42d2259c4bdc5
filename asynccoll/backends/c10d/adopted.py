"""What is asked about a group of torch's that the user has made, to join the world beside it."""

from __future__ import annotations

import os

import torch.distributed as dist

from asynccoll.backends.api import LaunchInfo, detect
from asynccoll.errors import LaunchEnvironmentError

__all__ = ["matching_launch", "own_part"]


def own_part(store: dist.Store, rank: int) -> dist.Store:
    """The part of the user's group's ``store`` for this life of ours beside it.

    Nobody is waited for: the ranks of one group go through the same lives.
    """
    life = store.add(f"asynccoll/lives/{rank}", 1)
    return dist.PrefixStore(f"asynccoll/{life}", store)


def matching_launch(rank: int, world_size: int) -> LaunchInfo | None:
    """What the launcher says, if it speaks of the same place; a group made by hand may not."""
    try:
        launch = detect(os.environ)
    except LaunchEnvironmentError:
        return None
    return launch if (launch.rank, launch.world_size) == (rank, world_size) else None

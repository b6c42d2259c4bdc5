"""Which worlds a process has: what ``initialize`` joined, what torch made, the one of its own.

Holds them; who joins and leaves is elsewhere.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from asynccoll import host

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from asynccoll.world.context import Context, Identity

__all__ = ["Process", "of_thread", "process", "torch_group"]

#: The rank that the calling context is, where ranks are threads of one process.
of_thread: ContextVar[Context | None] = ContextVar("asynccoll_context", default=None)


class Process:
    """What the process as a whole has: never a rank where ranks are threads."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[bool] = host.RLock()
        self.context: Context | None = None  # initialized here
        self.adopted: tuple[Any, Context] | None = None  # torch's default group (weakly), and ours on it
        self.embedded: Context | None = None  # the world of one
        self.said: str | None = None  # WORLD_SIZE in the environment in which that was right
        self.left: Identity | None = None  # who this was in the world that it has finalized
        self.thread_ranks: list[Context] = []  # those that are threads of this process
        self.inherited: object = None  # a parent's torch group, in a forked child: not to be used
        self.parent: Context | None = None  # its context, in a forked child: says who this is
        self.parent_adopted = False


process: Process = host.per_process(Process)


def torch_group() -> object:
    """torch's default group, if the user made one in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    native = dist.distributed_c10d.GroupMember.WORLD
    return None if native is process.inherited else native

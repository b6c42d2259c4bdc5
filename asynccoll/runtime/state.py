"""The worlds of a process: the one that ``initialize`` joined, one adopted from torch, and a world of one.

This module only holds them; ``process`` joins and leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch.distributed as dist

from asynccoll import host
from asynccoll.host.forks import inherited
from asynccoll.world.context import Context, Identity

#: The context of the calling thread's or task's rank, where ranks are threads of one process.
of_thread: ContextVar[Context | None] = ContextVar("asynccoll_context", default=None)


class Process:
    """The worlds of the process as a whole; ranks that are threads have their contexts in ``of_thread``."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[bool] = host.RLock()
        self.context: Context | None = None  # initialized here
        #: torch's default group (weak), and our context on it
        self.adopted: tuple[Callable[[], object], Context] | None = None
        self.embedded: Context | None = None  # the world of one
        self.said: str | None = None  # WORLD_SIZE in the environment for which ``embedded`` was right
        self.left: Identity | None = None  # which rank this was in the world that it has finalized
        self.thread_ranks: list[Context] = []  # the ranks that are threads of this process
        self.inherited: object = inherited()  # the parent's torch group, which a child must not use
        self.parent: Context | None = None  # in a forked child: the parent's, which says which rank this is
        self.parent_adopted = False  # whether that context was on an adopted torch group


process: Process = host.per_process(Process)


def rank_here() -> Context | None:
    """Return the context of the calling thread's or task's rank, where ranks are threads, until it is closed.

    A task that calls ``finalize`` clears the variable in its own copy only.
    """
    context = of_thread.get()
    return None if context is None or context.closed else context


def torch_group() -> object:
    """Return torch's default group, if the user made one in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    native = dist.distributed_c10d.GroupMember.WORLD
    return None if native is process.inherited else native

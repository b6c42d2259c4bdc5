"""What a forked child knows of its parent's world: the parent's place in it. It cannot communicate there.

A DataLoader worker may ask for its rank; connections and native objects belong to the parent alone.
"""

from __future__ import annotations

import copy
import os

import torch.distributed as dist

from asynccoll.backends import choosing
from asynccoll.backends.api.request import of_torch
from asynccoll.backends.api.tcpstore import served
from asynccoll.errors import ForkedProcessError
from asynccoll.host import forks
from asynccoll.runtime.state import of_thread, process, rank_here, torch_group
from asynccoll.world.context import Context


def _in_child() -> None:
    """Reset the process's state to what the child may know: its parent's place."""
    before = copy.copy(process)
    process.__init__()  # type: ignore[misc]  # the same object, in another process
    adopted = before.adopted[1] if before.adopted else None
    mine = rank_here() or before.context or adopted or before.parent
    process.left = before.left
    of_thread.set(None)
    forks.keep(before, served)
    if dist.is_available():
        forks.keep(*dist.distributed_c10d._world.pg_map.items())
    if mine is None:
        return
    if mine.backend.survives_fork:
        process.context = Context(mine.backend, mine.identity, timeout=mine.timeout, check="off")
        return
    process.parent = mine
    process.parent_adopted = before.parent_adopted if mine is before.parent else mine is adopted
    for context in {before.context, adopted, mine, *before.thread_ranks}:
        if context is not None and context is not before.parent:
            forks.keep(context.disown(refused(context)))


def refused(context: Context) -> ForkedProcessError:
    """Build the error for a call that would communicate in a child forked from ``context``'s process."""
    return ForkedProcessError(
        f"this process ({os.getpid()}) was forked from rank {context.rank} of {context.world_size}, whose "
        "connections it cannot use: ac.get_rank() and the like work here, but it cannot communicate. Do "
        "that in the parent, call ac.initialize() here, or start processes with the 'spawn' method"
    )


forks.in_child(after_in_child=_in_child)


def parent() -> Context | None:
    """Return the parent's context, for rank queries in a forked child without its own world; else None."""
    if process.context is not None or torch_group() is not None:
        return None
    if process.parent is None and process.inherited is not None and dist.is_initialized():
        # The parent had no context of ours: rank and world size are those of torch's group.
        process.parent = choosing.adopt(
            of_torch(), None, dist.get_rank(), dist.get_world_size(), 1800.0, "off"
        )
        process.parent_adopted = True
    return process.parent


def forked() -> bool:
    """Whether this is a forked child without a world of its own, which only knows its parent's place."""
    return rank_here() is None and parent() is not None


def forget_torch() -> None:
    """Have torch forget the parent's groups, lest a world that the child makes is made on one of them."""
    native = dist.distributed_c10d.GroupMember.WORLD if dist.is_available() else None
    if native is not None and native is process.inherited:
        dist.distributed_c10d._world.pg_names.clear()  # torch shuts down what is named there
        dist.destroy_process_group()

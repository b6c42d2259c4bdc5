"""Where this rank is among those of its node, by ignite's rules, if no launcher said it in full.

The local rank is SLURM's, else ``LOCAL_RANK``, else the hint of ``set_local_rank``, else a guess from the
node names. The number of ranks on a node is the largest local rank plus one. The values of other ranks are
read from torch's store, where each rank puts its own at its first query: a query is not a collective.
"""

from __future__ import annotations

import json
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import asynccoll as ac
from asynccoll import host
from asynccoll.environment.info import Variables
from asynccoll.environment.nodes import node_name
from asynccoll.runtime.forked import forked

__all__ = ["Layout", "announce", "hint", "layout"]

_GUESSING = (
    "Local rank information for native distributed setting will be initialized using "
    "a heuristic approach based on the hostnames. In some corner cases, determined "
    "local rank can be different from the real setup. To avoid this warning, "
    "please either set `os.environ['LOCAL_RANK']` "
    "or use `idist.set_local_rank(local_rank)` with correct local rank index."
)


@dataclass(frozen=True)
class Layout:
    """The place of this rank on its node, and of the node in the job."""

    local_rank: int
    nproc_per_node: int
    nnodes: int
    node_rank: int


class _State:
    """What is known about torch's current default group."""

    def __init__(self) -> None:
        self.hinted: int | None = None
        self.group: weakref.ref[object] | None = None
        self.mine: int | None = None
        self.layout: Layout | None = None


_state = host.per_process(_State)


def hint(index: int) -> None:
    """Remember what ``set_local_rank`` says."""
    _state.hinted = index


def announce() -> None:
    """Tell the others where this rank is, once for each default group that torch has had."""
    native = dist.distributed_c10d.GroupMember.WORLD
    if native is None or forked() or (_state.group is not None and _state.group() is native):
        return
    _state.layout = None
    _state.mine = _told()
    if dist.get_world_size() > 1:
        entry = {"node": node_name(), "local_rank": _state.mine}
        _store().set(f"layout/{dist.get_rank()}", json.dumps(entry))
    _state.group = weakref.ref(native)  # last: if Ctrl-C comes before, the next call tells the others


def layout() -> Layout:
    """Return the layout of torch's current default group; waits until the others have announced theirs."""
    announce()
    if _state.layout is None and forked():  # the others cannot be asked here; what the launcher said is known
        return Layout(ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes(), ac.get_node_rank())
    if _state.layout is None:
        rank, size = dist.get_rank(), dist.get_world_size()
        entries = [json.loads(_store().get(f"layout/{index}")) for index in range(size)] if size > 1 else []
        _state.layout = _arrange(rank, size, entries)
    return _state.layout


def _told() -> int | None:
    """Return the local rank that was set explicitly, if any."""
    names = ("SLURM_LOCALID", "LOCAL_RANK") if os.environ.get("SLURM_JOB_ID") else ("LOCAL_RANK",)
    said = Variables(os.environ).first(*names)
    return _state.hinted if said is None else said


def _arrange(rank: int, size: int, entries: list[dict[str, Any]]) -> Layout:
    if _state.mine is None:
        warnings.warn(_GUESSING, stacklevel=4)
    if size == 1:
        return Layout(_state.mine or 0, 1, 1, 0)
    nodes = [entry["node"] for entry in entries]
    locals_ = [
        nodes[:index].count(nodes[index]) if entry["local_rank"] is None else entry["local_rank"]
        for index, entry in enumerate(entries)
    ]
    per_node = max(locals_) + 1
    return Layout(locals_[rank], per_node, size // per_node, rank // per_node)


def _store() -> dist.Store:
    return dist.PrefixStore("asynccoll.sync", dist.distributed_c10d._get_default_store())

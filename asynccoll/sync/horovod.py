"""The parts of ignite's Horovod model that only Horovod has: ADASUM, process sets, and its context."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import torch

import asynccoll as ac
from asynccoll import host

__all__ = ["adasum", "is_process_set", "joined_by_user", "new_group", "shutdown"]


class _Sets:
    """The process sets that ``new_group`` has made; Horovod refuses a second one of the same ranks."""

    made: dict[tuple[int, ...], object]

    def __init__(self) -> None:
        self.made = {}


_sets = host.per_process(_Sets)
_adasums = itertools.count()


def _loaded() -> ModuleType | None:
    return sys.modules.get("horovod.torch")


def joined_by_user() -> bool:
    """Whether ``hvd.init()`` has been called."""
    hvd = _loaded()
    return hvd is not None and bool(hvd.is_initialized())


def shutdown() -> None:
    """Leave Horovod, even if the user joined it."""
    _sets.made.clear()
    if joined_by_user():
        sys.modules["horovod.torch"].shutdown()


def adasum(tensor: object) -> Any:
    """Run Horovod's own ADASUM, which it has if it was built with MPI or NCCL."""
    import horovod.torch as hvd

    # Named, so that ranks agree even if one of them has called other functions of Horovod before.
    how = {"op": hvd.Adasum, "name": f"asynccoll.sync.adasum.{next(_adasums)}"}
    if isinstance(tensor, torch.Tensor):
        return hvd.allreduce(tensor, **how)
    return hvd.allreduce(torch.tensor(tensor, dtype=torch.float64, device="cpu"), **how).tolist()


def new_group(ranks: list[int]) -> Any:
    """Return a ``horovod.torch.ProcessSet`` that is also a group of ours; every rank calls it."""
    import horovod.torch as hvd

    key = tuple(sorted(ranks))
    if key not in _sets.made:
        whole = key == tuple(range(hvd.size()))
        _sets.made[key] = hvd.global_process_set if whole else hvd.add_process_set(list(key))
    ac.new_group(list(key))
    return _sets.made[key]


def is_process_set(group: object) -> bool:
    """Whether ``group`` is one of Horovod's process sets."""
    hvd = _loaded()
    return hvd is not None and isinstance(group, hvd.ProcessSet)

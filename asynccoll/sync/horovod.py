"""The parts of ignite's Horovod model that only Horovod has: ADASUM, process sets, and its context."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import torch

import asynccoll as ac
from asynccoll.order.lane import DEFAULT

__all__ = ["adasum", "is_process_set", "joined_by_user", "new_group", "shutdown"]

_adasums = itertools.count()


def _loaded() -> ModuleType | None:
    return sys.modules.get("horovod.torch")


def joined_by_user() -> bool:
    """Whether ``hvd.init()`` has been called."""
    hvd = _loaded()
    return hvd is not None and bool(hvd.is_initialized())


def shutdown() -> None:
    """Leave Horovod, even if the user joined it."""
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
    group = ac.new_group(ranks)
    context = group.context
    return context.backend.native_group(group.opening(DEFAULT, 0, lambda: context.closed), None)


def is_process_set(group: object) -> bool:
    """Whether ``group`` is one of Horovod's process sets."""
    hvd = _loaded()
    return hvd is not None and isinstance(group, hvd.ProcessSet)

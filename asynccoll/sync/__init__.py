"""A drop-in for ``ignite.distributed``: ``import asynccoll.sync as idist``.

The same names, signatures and results, built on the async operations: each call starts one and waits for
it (except for ADASUM, which Horovod itself runs). A program moves to ``await ac.all_reduce(x)`` a line at a
time; both work on the same world. What ignite does differently is known here, and must not be known below.

Where ignite is wrong, this package is right: ``docs/migrating-from-ignite.md`` lists each difference.
"""

from __future__ import annotations

from asynccoll.sync.auto import DistributedProxySampler, auto_dataloader, auto_model, auto_optim
from asynccoll.sync.launcher import Parallel
from asynccoll.sync.utils import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    available_backends,
    backend,
    barrier,
    broadcast,
    device,
    finalize,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    hostname,
    initialize,
    model_name,
    new_group,
    one_rank_first,
    one_rank_only,
    registered_computation_models,
    set_local_rank,
    show_config,
    spawn,
    sync,
)

__all__ = [
    "DistributedProxySampler",
    "Parallel",
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]

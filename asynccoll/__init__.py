"""Functional async collectives: plain functions that start at once and return an awaitable ``Work``.

import asynccoll as ac

ac.initialize()
work = ac.all_reduce(grad)      # started now
loss = next_batch_forward()     # overlaps with it
grad = await work               # asyncio or trio; work.wait() without a loop
"""

import sys
from typing import TYPE_CHECKING, NoReturn

from asynccoll import elastic, overlap, trace
from asynccoll.auto import (
    AsyncOptimizer,
    DistributedProxySampler,
    async_optim,
    auto_dataloader,
    auto_model,
    auto_optim,
    gather_for_metrics,
    manual_seed,
)
from asynccoll.errors import (
    AbortedError,
    AsyncCollError,
    BackendNotFoundError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DiscardedResultWarning,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidCallError,
    LaneLimitError,
    LaneOrderError,
    LaunchEnvironmentError,
    NotInitializedError,
    PayloadTypeError,
    PeerLostError,
    PeerRefusedError,
    SpawnError,
    UnawaitedWorkWarning,
    UnsupportedOpError,
    WorkNotDoneError,
)
from asynccoll.host import elsewhere
from asynccoll.launch.parallel import Parallel
from asynccoll.launch.spawn import spawn
from asynccoll.memory.aliasing import may_overlap
from asynccoll.modes.isolation import isolated
from asynccoll.ops.adopting import adopt
from asynccoll.ops.anysource import AnySource, recv_any, recv_any_object
from asynccoll.ops.asking import who_is_missing
from asynccoll.ops.batches import P2POp, batch_isend_irecv
from asynccoll.ops.coalescing import coalescing
from asynccoll.ops.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    explain,
    gather,
    gather_object,
    join,
    monitored_barrier,
    permute,
    recv,
    recv_object,
    reduce,
    reduce_scatter,
    scatter,
    scatter_object,
    send,
    send_object,
)
from asynccoll.ops.main_rank import is_main, main_first, print0
from asynccoll.ops.prepared import Prepared, prepare
from asynccoll.ops.scopes import (
    TaskGroup,
    backward_lane,
    close_lane,
    create_task_group,
    lane,
    new_lane,
    scope,
)
from asynccoll.overlap import overlap_gradients
from asynccoll.payload.codecs import Codec
from asynccoll.plan.spec import ReduceOp, ReduceOpLike
from asynccoll.runtime.process import (
    available_backends,
    backend,
    device,
    finalize,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    hostname,
    initialize,
    is_initialized,
    new_group,
    new_subgroups,
)
from asynccoll.runtime.session import session
from asynccoll.waiting.arriving import as_completed
from asynccoll.waiting.work import Work, wait_all
from asynccoll.world.group import Group, GroupLike

__version__ = "0.1.0"

__all__ = (
    "AbortedError",
    "AnySource",
    "AsyncCollError",
    "AsyncOptimizer",
    "BackendNotFoundError",
    "Codec",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DiscardedResultWarning",
    "DistributedProxySampler",
    "ForkedProcessError",
    "Group",
    "GroupLike",
    "InvalidArgumentError",
    "InvalidCallError",
    "LaneLimitError",
    "LaneOrderError",
    "LaunchEnvironmentError",
    "NotInitializedError",
    "P2POp",
    "Parallel",
    "PayloadTypeError",
    "PeerLostError",
    "PeerRefusedError",
    "Prepared",
    "ReduceOp",
    "ReduceOpLike",
    "SpawnError",
    "TaskGroup",
    "UnawaitedWorkWarning",
    "UnsupportedOpError",
    "Work",
    "WorkNotDoneError",
    "adopt",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "as_completed",
    "async_optim",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "backward_lane",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object",
    "close_lane",
    "coalescing",
    "create_task_group",
    "device",
    "elastic",
    "explain",
    "finalize",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "hostname",
    "initialize",
    "is_initialized",
    "is_main",
    "isolated",
    "join",
    "lane",
    "main_first",
    "manual_seed",
    "may_overlap",
    "monitored_barrier",
    "new_group",
    "new_lane",
    "new_subgroups",
    "overlap",
    "overlap_gradients",
    "permute",
    "prepare",
    "print0",
    "recv",
    "recv_any",
    "recv_any_object",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "scope",
    "send",
    "send_object",
    "session",
    "spawn",
    "trace",
    "wait_all",
    "who_is_missing",
)

#: Packages that are for some programs, or heavy.
_IMPORTED_ALONE = ("sync", "testing")


def __dir__() -> list[str]:
    """The public names; what the package is made of is found by its path."""
    return [*__all__, "__doc__", "__version__"]


if not TYPE_CHECKING:  # or type checkers would take any name for one of ours

    def __getattr__(name: str) -> NoReturn:
        """Say what is written here for what other libraries call ``name``, or where ours of that name is."""
        within = next((one.__name__ for one in (overlap, trace) if name in one.__all__), "")
        meant = f"ac.{within.rpartition('.')[2]}.{name}" if within else elsewhere.called_here(name)
        if meant:
            raise AttributeError(f"asynccoll has no {name!r}: write {meant}", name=name)
        if name in _IMPORTED_ALONE:
            raise AttributeError(f"asynccoll has no {name!r} yet: import asynccoll.{name}", name=name)
        told = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(told, name=name, obj=sys.modules[__name__])  # of which Python suggests another

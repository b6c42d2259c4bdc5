"""torch's own MPI backend, for a torch that was built with one and where mpi4py is not installed.

torch hands out one communicator of the world and those of ``new_group``, nothing that opens among its
members; so there is the world's default lane here and no other, no ad-hoc groups and no messages.
mpi4py has all of these, which is why it goes first wherever it is installed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from asynccoll.backends.c10d_communicator import C10dCommunicator, Transport
from asynccoll.backends.c10d_completion import HostCompletion
from asynccoll.backends.channels import Channels
from asynccoll.backends.meeting import agree_on_store
from asynccoll.errors import UnsupportedOpError
from asynccoll.lane import DEFAULT
from asynccoll.spec import Capabilities, Op, ReduceOp

if TYPE_CHECKING:
    from asynccoll.backends import Request
    from asynccoll.context import Context
    from asynccoll.group import Group

__all__ = ["CAPABILITIES", "create"]

_ORDERED = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64)
CAPABILITIES = Capabilities(
    backend="mpi (torch's own MPI, through c10d)",
    ops=frozenset(Op) - {Op.SEND, Op.RECV},
    reduce=tuple((dtype, _ORDERED) for dtype in _TYPES),
    move=frozenset(_TYPES),
    compose=frozenset({Op.REDUCE_SCATTER}),  # torch's MPI has none
)


class TorchMpiBackend:
    """torch's MPI process group, for one rank."""

    name = "mpi"
    device = torch.device("cpu")
    open_waits = False
    ad_hoc_groups = False
    stream_ordered = False
    orders_lanes = False

    def capabilities(self, device: str) -> Capabilities:
        return CAPABILITIES

    def open(self, group: Group, lane: str, epoch: int) -> C10dCommunicator:
        if not group.is_world or lane != DEFAULT or epoch:
            raise UnsupportedOpError(
                f"torch's own MPI has one order of the world's operations, and lane {lane!r} of "
                f"{group!r} would need another; pip install asynccoll[mpi] for lanes, groups and messages"
            )
        native: Any = dist.distributed_c10d._get_default_group()
        return C10dCommunicator(
            {"cpu": Transport(native, HostCompletion)}, Channels(_no_pair, group.rank), group.size
        )

    def close(self, *, abort: bool) -> None:
        if dist.is_initialized() and not abort:
            dist.destroy_process_group()

    def native_group(self, group: Group) -> Any:
        return dist.distributed_c10d._get_default_group()


def _no_pair(peer: int) -> Any:
    raise AssertionError("messages are refused by the planner")


def create(request: Request) -> Context:
    """The world that torch's MPI sees."""
    from asynccoll.context import Context, Identity

    request.take_options()
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    launch = request.launch
    identity = Identity(rank, size, rank, size)
    if launch is not None and (launch.rank, launch.world_size) == (rank, size):
        nodes = (launch.node_rank, launch.nnodes)
        identity = Identity(rank, size, launch.local_rank, launch.local_world_size, *nodes)
    store = None
    if size > 1:
        timeout = timedelta(seconds=request.timeout)
        store = agree_on_store(rank, _broadcast, timeout, one_host=identity.nnodes == 1)
    context = Context(TorchMpiBackend(), identity, store=store, timeout=request.timeout, check=request.check)
    context.world.lane().open()
    return context


def _broadcast(text: str | None) -> str:
    """The text of rank 0."""
    box = [text]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]

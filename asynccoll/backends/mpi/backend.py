"""MPI through mpi4py: nonblocking collectives on the tensors' own memory, with ordinary wheels.

This module says what the backend can do, and joins a world. It loads MPI only when a world is made.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from asynccoll.backends.api import (
    LONGEST_NAP_SECONDS,
    SHORTEST_NAP_SECONDS,
    Backend,
    Capabilities,
    Communicator,
    Context,
    Identity,
    Op,
    Opening,
    ReduceOp,
    Request,
    Training,
    agree_on_store,
    make_default_group,
    own_device,
    usable_cores,
)
from asynccoll.backends.mpi.library import Library, load
from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError, LaunchEnvironmentError

if TYPE_CHECKING:
    from asynccoll.backends.mpi.communicator import MpiCommunicator

_ORDERED = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
_COMPLEX = (torch.complex64, torch.complex128)
#: Data is moved as bytes, so every dtype can be moved.
_MOVED = frozenset(
    {
        *_INTEGERS,
        torch.bool,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)


def _row(devices: tuple[str, ...], keeps_input: frozenset[Op]) -> Capabilities:
    return Capabilities(
        backend="mpi",
        ops=frozenset(Op),
        sparse=True,
        reduce=(
            *((dtype, _ORDERED | _BITWISE) for dtype in _INTEGERS),
            *((dtype, _ORDERED) for dtype in (torch.float32, torch.float64)),
            *((dtype, frozenset({ReduceOp.SUM, ReduceOp.PRODUCT})) for dtype in _COMPLEX),
        ),
        move=_MOVED,
        devices=frozenset(devices),
        keeps_input=keeps_input,
    )


#: Keyed by whether the library takes device memory, and whether it is faster with separate input and output
#: (Open MPI) than in place (MPICH, which would copy the input itself).
_ROWS = {
    (cuda_aware, apart): _row(
        ("cpu", "cuda") if cuda_aware else ("cpu",),
        frozenset({Op.REDUCE, Op.ALL_REDUCE} if apart else {Op.REDUCE}),
    )
    for cuda_aware in (False, True)
    for apart in (False, True)
}

#: The numbers of worlds, which keep the names of their communicators apart. All ranks use rank 0's number:
#: after an ``initialize`` that failed halfway, ranks may have begun different numbers of worlds.
_worlds = count(1)

#: The duplicate that other ranks have yet to ask for: the next ``initialize`` goes on waiting for it.
_duplicating: list[Any] = []


class MpiTraining(Training):
    """The defaults, but without torch's DDP, which does not support MPI."""

    ddp = False


class MpiBackend(Backend):
    """MPI for one rank."""

    opens_early = True

    name = "mpi"
    ends_alone = True
    training: MpiTraining = MpiTraining()

    def __init__(
        self,
        library: Library,
        base: Any,
        device: torch.device,
        *,
        owns_default_group: bool,
        crowded: bool,
        number: int,
    ) -> None:
        """``number`` identifies this world: it is the same on every rank, and differs from other worlds'."""
        from asynccoll.backends.mpi.completion import BURST, BURST_WHERE_CROWDED
        from asynccoll.backends.mpi.opening import Opener

        self.mpi = library
        self.device = device
        self._base = base
        self._burst = BURST_WHERE_CROWDED if crowded else BURST
        self._owns_default_group = owns_default_group
        self._opener = Opener(library, base, f"asynccoll {number} ")

    def capabilities(self, device: str) -> Capabilities:
        return _ROWS[self.mpi.cuda_aware, self.mpi.name.startswith("Open MPI")]

    def open(self, opening: Opening) -> MpiCommunicator:
        from asynccoll.backends.mpi.communicator import MpiCommunicator

        native = self._opener.open(opening)
        return MpiCommunicator(native, self.mpi, opening.rank, opening.size, self._burst)

    def native_group(self, opening: Opening, communicator: Communicator | None) -> object:
        """Return the group's mpi4py communicator, once it is open. There is no torch process group."""
        return getattr(communicator, "native", None)

    def close(self, *, abort: bool) -> None:
        self._opener.close()
        if self._owns_default_group and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if not (abort or self.mpi.MPI.Is_finalized()):
            with contextlib.suppress(self.mpi.MPI.Exception):
                self._base.Free()


def capabilities(name: str, device: str) -> Capabilities:
    """Return the row of a library that does not take device memory."""
    return _ROWS[False, False]


# Making a context

#: What ``create`` takes besides the arguments of every backend.
OPTIONS = ("torch_group",)


def create(request: Request) -> Context:
    """Join the world that mpiexec made; without mpiexec, a world of one rank."""
    options = request.take_options(*OPTIONS)
    if request.store is not None or request.init_method not in (None, "env://"):
        raise InvalidArgumentError(
            "backend 'mpi' finds its ranks through MPI: start them with mpiexec or `asynccoll run --backend "
            "mpi`, and pass neither store= nor init_method="
        )
    library = load()
    mpi = library.MPI
    _check_place(request, mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    base = _duplicate(library, request.timeout)
    base.Set_errhandler(mpi.ERRORS_RETURN)
    identity, nodes = _locate(mpi, base)
    number = base.bcast(next(_worlds))  # now, as what follows may raise on one rank only; others would block
    timeout = timedelta(seconds=request.timeout)
    store = None
    if base.Get_size() > 1:
        one_host = identity.nnodes == 1
        store = agree_on_store(base.Get_rank(), base.bcast, timeout, one_host=one_host)
    device = own_device(identity.local_rank) if library.cuda_aware else torch.device("cpu")
    owns_default = options.get("torch_group", True) and make_default_group(store, identity, timeout)
    backend = MpiBackend(
        library,
        base,
        device,
        owns_default_group=owns_default,
        crowded=identity.nproc_per_node > usable_cores(),
        number=number,
    )
    return Context(backend, identity, store=store, timeout=request.timeout, check=request.check, nodes=nodes)


def _check_place(request: Request, rank: int, size: int) -> None:
    """Raise if the caller or another launcher gives another rank or world size than MPI."""
    launch = request.launch
    said = (request.rank, request.world_size)
    if request.rank is None and launch is not None and launch.launcher != "serial":
        said = (launch.rank, launch.world_size)
    if said[0] is None or said == (rank, size):
        return
    who = launch.launcher if launch is not None else "the call"
    raise LaunchEnvironmentError(
        f"{who} says rank {said[0]} of {said[1]}, but MPI says rank {rank} of {size}; start the ranks "
        "with mpiexec (of the MPI library that mpi4py loads), with `asynccoll run --backend mpi`, or under "
        "SLURM with `srun --mpi=pmi2` if that library supports it (MPICH does)"
    )


def _duplicate(library: Library, seconds: float) -> Any:
    """Return a duplicate of the world's communicator, once every rank has asked for it.

    It waits outside of MPI, so that Ctrl-C is handled.
    """
    world = library.MPI.COMM_WORLD
    if not _duplicating:
        _duplicating.append(library.call(world.Idup))
    base, request = _duplicating[0]
    deadline, nap = monotonic() + seconds, SHORTEST_NAP_SECONDS
    while not library.call(request.Test):
        if monotonic() >= deadline:
            raise CollectiveTimeoutError(
                f"not all of MPI's {world.Get_size()} ranks joined the world within {seconds:g} s: one has "
                "not called ac.initialize, or has failed in it"
            )
        sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)
    _duplicating.clear()
    return base


def _locate(mpi: ModuleType, base: Any) -> tuple[Identity, tuple[int, ...]]:
    """Return this rank's place, and the node of each rank, according to MPI."""
    here = base.Split_type(mpi.COMM_TYPE_SHARED)
    leaders = base.allgather(here.bcast(base.Get_rank()))
    nodes = sorted(set(leaders))
    identity = Identity(
        base.Get_rank(),
        base.Get_size(),
        here.Get_rank(),
        here.Get_size(),
        nodes.index(leaders[base.Get_rank()]),
        len(nodes),
    )
    here.Free()
    return identity, tuple(map(nodes.index, leaders))

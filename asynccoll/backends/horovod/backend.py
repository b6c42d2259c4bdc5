"""Horovod: the same API on clusters that run it, through its asynchronous calls and its process sets.

This module says what the backend can do, and joins the world that ``horovodrun`` has made. It loads Horovod
only then. Groups are process sets, which every rank has to register.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from asynccoll.backends.api import (
    Backend,
    Capabilities,
    Communicator,
    Completion,
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
)
from asynccoll.backends.horovod.library import load, start
from asynccoll.backends.horovod.process_sets import ProcessSets
from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError, LaunchEnvironmentError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from asynccoll.backends.horovod.communicator import HorovodCommunicator, Rounds


class HorovodTraining(Training):
    """No DDP, which does not support Horovod. Horovod's optimizer has gradients in flight until ``step``."""

    ddp = False
    starts_as_first = True

    def own_optimizer(self, optimizer: Optimizer, options: Mapping[str, object]) -> Optimizer | None:
        import horovod.torch as hvd

        distributed: Optimizer = hvd.DistributedOptimizer(optimizer, **options)
        distributed.state.update(optimizer.state)  # Horovod takes over only the parameters and their options
        return distributed


_ORDERED = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.float32, torch.float64)

HOROVOD = Capabilities(
    backend="horovod",
    ops=frozenset(Op) - {Op.SEND, Op.RECV},
    reduce=(
        *((dtype, _ORDERED) for dtype in _INTEGERS),
        (torch.float16, _ORDERED),  # no average: Horovod divides the sum, which may have overflowed
        *((dtype, _ORDERED | {ReduceOp.AVG}) for dtype in (torch.float32, torch.float64)),
    ),
    move=frozenset({torch.uint8, torch.int8, torch.int16, *_INTEGERS, *_FLOATS}),
    sparse=True,
    # Horovod's own takes only sums and averages, and copies the whole tensor first.
    compose=frozenset({Op.REDUCE_SCATTER}),
    built_of=(
        (Op.REDUCE, "all_reduce"),
        (Op.GATHER, "all_to_all"),
        (Op.SCATTER, "all_to_all"),
        (Op.BARRIER, "all_reduce"),
    ),
)

_ADASUM = tuple(
    (dtype, ops | {ReduceOp.ADASUM} if dtype in _FLOATS else ops) for dtype, ops in HOROVOD.reduce
)
WITH_ADASUM = replace(HOROVOD, reduce=_ADASUM)

#: How long a rank that leaves waits for the other ranks to finish.
_LEAVE_SECONDS = 30.0
#: Room for what rank 0 tells the other ranks when they meet.
_TOLD_BYTES = 1024


class HorovodBackend(Backend):
    """Horovod for one rank."""

    opens_early = True
    leaves_together = True

    name = "horovod"
    ad_hoc_groups = False
    joins = True
    training: HorovodTraining = HorovodTraining()

    def __init__(
        self, hvd: ModuleType, token: str, device: torch.device, *, owns_default_group: bool
    ) -> None:
        from asynccoll.backends.horovod.communicator import Rounds

        self.hvd = hvd
        self._row = WITH_ADASUM if hvd.mpi_built() or hvd.nccl_built() else HOROVOD
        self.device = device
        self._token = token
        self._owns_default_group = owns_default_group
        self._sets = ProcessSets(hvd)
        self._rounds = Rounds()

    def capabilities(self, device: str) -> Capabilities:
        return self._row

    def prepare_group(self, opening: Opening) -> None:
        """Register the group's process set, as every rank does. Members wait for it when they use it."""
        if not opening.is_world:
            self._sets.register(opening)

    def unprepared(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return self._sets.absent(ranks)

    def open(self, opening: Opening) -> HorovodCommunicator:
        prefix = f"{self._token}/{opening.lane}@{opening.epoch}"
        if opening.is_world:
            communicator = _in_world(self.hvd, prefix, self._rounds)
        else:
            from asynccoll.backends.horovod.communicator import HorovodCommunicator, Rounds

            native = self._sets.wait(opening.ranks, opening.given_up)
            communicator = HorovodCommunicator(native, opening.ranks, opening.rank, prefix, Rounds())
        return communicator

    def barrier(self, name: str) -> Completion:
        """Start a barrier of all ranks, of a name that is used once."""
        return _in_world(self.hvd, f"{self._token} {name}", self._rounds).barrier()

    def native_group(self, opening: Opening, communicator: Communicator | None) -> object:
        """Return the process set, for ``horovod.torch``'s own functions, once every rank has asked for it."""
        if opening.is_world:
            return self.hvd.global_process_set
        return self._sets.wait(opening.ranks, opening.given_up)

    def close(self, *, abort: bool) -> None:
        """Leave together: the first rank to end shuts Horovod down for all of them."""
        self._sets.close()
        if not abort and self.hvd.size() > 1 and self.hvd.is_initialized():
            with contextlib.suppress(Exception):  # a peer that has failed does not take part
                self.barrier("leaves").wait(_LEAVE_SECONDS)
        if self._owns_default_group and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _in_world(hvd: ModuleType, prefix: str, rounds: Rounds) -> HorovodCommunicator:
    from asynccoll.backends.horovod.communicator import HorovodCommunicator

    return HorovodCommunicator(hvd.global_process_set, range(hvd.size()), hvd.rank(), prefix, rounds)


def capabilities(name: str, device: str) -> Capabilities:
    """Return the row without adasum: whether Horovod was built with it is known only once it is loaded."""
    return HOROVOD


# Making a context

#: What ``create`` takes besides the arguments of every backend.
OPTIONS = ("torch_group", "comm")


def create(request: Request) -> Context:
    """Join the world that horovodrun made, or that the user has joined with ``hvd.init()``."""
    options = request.take_options(*OPTIONS)
    if request.store is not None or request.init_method not in (None, "env://"):
        raise InvalidArgumentError(
            "backend 'horovod' finds its ranks through Horovod: start them with horovodrun or `asynccoll run "
            "--backend horovod`, and pass neither store= nor init_method="
        )
    hvd = load()
    deadline = monotonic() + request.timeout
    start(hvd, request.launch, options.get("comm"), request.timeout)
    identity = _locate(hvd)
    _check_place(request, identity)
    timeout = timedelta(seconds=request.timeout)
    store, token = _meet(hvd, identity, timeout, deadline)
    owns_default = options.get("torch_group", True) and make_default_group(store, identity, timeout)
    device = own_device(identity.local_rank)  # as Horovod's programs do, whether tensors are staged or not
    backend = HorovodBackend(hvd, token, device, owns_default_group=owns_default)
    context = Context(backend, identity, store=store, timeout=request.timeout, check=request.check)
    if identity.world_size > 1:
        try:
            # After this, all beacons are in the store, so that ranks that die from now on can be named.
            _finish(backend.barrier("begins"), deadline, timeout)
            context.liveness.learn(context.world.ranks)
        except BaseException:
            context.close(abort=True, patience=0.0)
            raise
    return context


def _locate(hvd: ModuleType) -> Identity:

    return Identity(
        hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    )


def _check_place(request: Request, identity: Identity) -> None:
    """Raise if the caller gives another rank or world size than Horovod."""
    said = (request.rank, request.world_size)
    found = (identity.rank, identity.world_size)
    if request.rank is not None and said != found:
        raise LaunchEnvironmentError(
            f"the call says rank {said[0]} of {said[1]}, but Horovod says rank {found[0]} of {found[1]}; "
            "start the ranks with horovodrun or `asynccoll run --backend horovod`"
        )


def _meet(
    hvd: ModuleType, identity: Identity, timeout: timedelta, deadline: float
) -> tuple[dist.Store | None, str]:
    """Return a store that rank 0 serves, and a token for names that no earlier world of this job has used.

    A world of one rank has no store.
    """
    token = secrets.token_hex(4)
    if identity.world_size == 1:
        return None, token
    from asynccoll.backends.horovod.communicator import Rounds

    # Not by Horovod's own broadcast_object, which has no time limit.
    meeting = _in_world(hvd, "asynccoll meets", Rounds())

    def broadcast(text: str | None) -> str:
        said = (text or "").encode().ljust(_TOLD_BYTES)
        told = torch.tensor(list(said), dtype=torch.uint8, device="cpu")
        _finish(meeting.broadcast(told, 0), deadline, timeout)
        return bytes(told.tolist()).decode().rstrip()

    token = broadcast(token)
    store = agree_on_store(identity.rank, broadcast, timeout, one_host=identity.nnodes == 1)
    return store, token


def _finish(call: Completion, deadline: float, timeout: timedelta) -> None:
    if not call.wait(deadline - monotonic()):
        raise CollectiveTimeoutError(
            f"not all of Horovod's ranks joined the world within {timeout.total_seconds():g} s: one has not "
            "called ac.initialize, or has failed in it"
        )
    error = call.error()
    if error is not None:
        raise error

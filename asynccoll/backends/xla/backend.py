"""XLA devices through torch_xla: replica threads on the CPU, a process for each chip on TPU.

This module says what the backend can do, and joins the world that torch_xla's runtime has made. It loads
torch_xla only then.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from asynccoll.backends.api import (
    Backend,
    Capabilities,
    Context,
    Identity,
    Op,
    Opening,
    ReduceOp,
    Request,
    Signal,
    flatten,
)
from asynccoll.backends.xla.training import XlaTraining
from asynccoll.errors import (
    InvalidArgumentError,
    LaunchEnvironmentError,
    UnsupportedOpError,
    collective_error,
)

if TYPE_CHECKING:
    from asynccoll.backends.xla.communicator import XlaCommunicator
    from asynccoll.backends.xla.device import Device
    from asynccoll.backends.xla.replicas import Replicas

_ORDERED = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
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


def _row(floats: tuple[torch.dtype, ...]) -> Capabilities:
    return Capabilities(
        backend="xla-tpu",
        ops=frozenset(Op) - {Op.SEND, Op.RECV},
        # Complex numbers are sent as pairs of reals, since complex128 would lose its imaginary part.
        reduce=tuple((dtype, _ORDERED) for dtype in (*_INTEGERS, *floats)),
        # Data is moved as integers only, since floats would lose the sign of zero and the payload of NaNs.
        move=frozenset(_INTEGERS),
        devices=frozenset({"xla", "cpu"}),
        built_of=(
            (Op.REDUCE, "all_reduce"),
            (Op.BROADCAST, "all_reduce"),
            (Op.GATHER, "all_gather"),
            (Op.SCATTER, "reduce_scatter"),
            (Op.PERMUTE, "collective_permute"),
            (Op.BARRIER, "all_reduce"),
        ),
    )


ON_CPU = _row((torch.float16, torch.float32, torch.float64))
ON_TPU = _row((torch.bfloat16, torch.float16, torch.float32, torch.float64))


class XlaBackend(Backend):
    """XLA for one rank: its device, its progress thread, and the other replicas in its process."""

    name = "xla-tpu"
    open_waits = False
    training: XlaTraining = XlaTraining()

    def __init__(self, xla: Device, rank: int, size: int, replicas: Replicas | None) -> None:
        from asynccoll.backends.xla.progress import Progress

        self.xla = xla
        self.device: torch.device = xla.torch_device
        self.progress: Progress = Progress(f"asynccoll-xla-{rank}", xla.adopt)
        #: Unless replicas are threads, every device runs every program: members alone cannot open a group.
        self.ad_hoc_groups: bool = replicas is not None
        self._size = size
        self._replicas = replicas

    def capabilities(self, device: str) -> Capabilities:
        return _platform_row()

    def open(self, opening: Opening) -> XlaCommunicator:
        from asynccoll.backends.xla.collectives import Members
        from asynccoll.backends.xla.communicator import XlaCommunicator
        from asynccoll.backends.xla.launching import Launcher, ProcessLauncher, ThreadLauncher

        launcher: Launcher
        if self._replicas is not None:
            launcher = ThreadLauncher(self._replicas, opening.name, opening.rank, opening.size)
        elif opening.is_world:
            launcher = ProcessLauncher(opening.name)
        else:
            raise UnsupportedOpError(
                f"on TPU every device runs every program: only the world can communicate, not ranks "
                f"{list(opening.ranks)}"
            )
        return XlaCommunicator(self, Members(opening.ranks, opening.rank, self._size), launcher)

    async def on_host(self, value: object) -> None:
        """Wait until everything in ``value`` is computed, without blocking the event loop."""
        pending = [x for x in flatten(value)[0] if isinstance(x, torch.Tensor) and x.device.type == "xla"]
        if not pending:
            return
        computed = Signal()
        failed: list[BaseException] = []

        def compute() -> None:
            try:
                with self.xla.lock:
                    self.xla.settle(pending)
                self.xla.wait()
            except BaseException as error:  # for the waiter to raise; this thread serves others, too
                failed.append(error)
            computed.set()

        self.progress.submit(compute)
        await computed.wait()
        if failed:
            raise collective_error(failed[0], "computing the result")

    def serves_this_thread(self) -> bool:
        """Whether the calling thread works for this replica's device; autograd has one thread per device."""
        return self.xla.is_of_this_thread()

    def disown(self) -> None:
        self.progress.disown()

    def close(self, *, abort: bool) -> None:
        self.progress.close()


def _platform_row() -> Capabilities:
    return ON_TPU if os.environ.get("PJRT_DEVICE", "CPU").startswith("TPU") else ON_CPU


def capabilities(name: str, device: str) -> Capabilities:
    """Return the row of the platform that torch_xla is told to use."""
    return _platform_row()


# Making a context

#: What ``create`` takes besides the arguments of every backend.
OPTIONS: tuple[str, ...] = ()


def create(request: Request) -> Context:
    """Join the world of torch_xla's runtime, as the replica that runs in this thread."""
    import torch_xla.runtime as xr

    from asynccoll.backends.xla.device import Device
    from asynccoll.backends.xla.replicas import join

    request.take_options(*OPTIONS)
    if request.store is not None or request.init_method not in (None, "env://"):
        raise InvalidArgumentError(
            "backend 'xla-tpu' finds its ranks through torch_xla's runtime: pass neither store= nor "
            "init_method="
        )
    if xr.is_spmd():
        raise LaunchEnvironmentError(
            "torch_xla is in SPMD mode (XLA_USE_SPMD or xr.use_spmd()), where one program sees all devices "
            "as one and XLA inserts the collectives; there are no ranks, and nothing for this package to do"
        )
    xla = Device()
    rank, size = xr.global_ordinal(), xr.world_size()
    here = xr.addressable_device_count() if size > 1 else 1
    _check_place(request, rank, size)
    _check_devices(here, size)
    replicas = None
    if here > 1 or size == 1:
        _check_pool(size)
        replicas = join(rank, size, request.timeout)
    identity = (
        Identity(rank, size, rank, size)
        if replicas is not None
        else Identity(
            rank, size, xr.local_ordinal(), xr.local_device_count(), xr.host_index(), xr.process_count()
        )
    )
    return Context(
        XlaBackend(xla, rank, size, replicas),
        identity,
        store=replicas.store if replicas is not None else None,
        timeout=request.timeout,
        check=request.check,
        thread_rank=size > 1 and replicas is not None,
    )


def _check_place(request: Request, rank: int, size: int) -> None:
    """Raise if the caller or a launcher gives another rank or world size than the runtime."""
    launch = request.launch
    said, who = (request.rank, request.world_size), "the call"
    if request.world_size is None and launch is not None and launch.launcher not in ("serial", "tpu"):
        said, who = (launch.rank, launch.world_size), launch.launcher
    said_rank, said_size = said
    if said_size in (None, size) and said_rank in (None, rank):
        return
    raise LaunchEnvironmentError(
        f"{who} says rank {said_rank} of {said_size}, but torch_xla's runtime says rank {rank} of {size}. On "
        "the CPU several processes do not form a world (each would silently be a world of one): ranks are "
        "threads of one process, started by ac.spawn('xla-tpu', ..., nproc_per_node=n) or ac.Parallel; on "
        "TPU torch_xla starts one process for each chip (torch_xla.launch)"
    )


def _check_devices(here: int, size: int) -> None:
    """Raise if the process has several ranks but not all, which no launcher supports (``launching``)."""
    if 1 < here < size:
        raise LaunchEnvironmentError(
            f"this process has {here} of {size} devices (TPU v2 and v3: two per chip); ranks are either all "
            "in one process, or each in a process of its own with one device"
        )


def _check_pool(size: int) -> None:
    """Raise if the runtime has too few threads: a collective holds one per replica until all have arrived."""
    pool = os.environ.get("XLA_THREAD_POOL_SIZE", "")
    if size > 2 and not (pool.isdigit() and int(pool) > size):
        raise LaunchEnvironmentError(
            f"{size} replicas in one process need XLA_THREAD_POOL_SIZE={size + 4} (it is {pool or 'unset'}) "
            "before torch_xla is used, or they would wait for each other forever; ac.spawn('xla-tpu', ...) "
            "sets it"
        )

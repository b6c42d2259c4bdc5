"""Querying, joining and leaving the world: the half of ``ignite.distributed.utils`` that moves no data.

The other half, the collectives, is in ``collectives``; both are importable from here, as in ignite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial, update_wrapper, wraps
from typing import Any

import torch

import asynccoll as ac
from asynccoll.backends.api import own_device
from asynccoll.errors import CollectiveError, InvalidArgumentError
from asynccoll.host.endings import in_full
from asynccoll.sync import layout as _layout
from asynccoll.sync import world as _world
from asynccoll.sync.collectives import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    barrier,
    broadcast,
    new_group,
)
from asynccoll.sync.logs import setup_logger
from asynccoll.sync.models import (
    HOROVOD,
    NATIVE,
    SERIAL,
    XLA,
    registered_computation_models,
)

__all__ = [
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
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

has_native_dist_support: bool = bool(NATIVE.available_backends)
has_xla_support: bool = XLA in registered_computation_models
has_hvd_support: bool = HOROVOD in registered_computation_models


# Which world


def sync(temporary: bool = False) -> None:
    """Check again which world there is, after it was made or destroyed with torch.

    Every function here checks by itself, so there is no need to call it; ``temporary`` has no effect.
    """
    _world.model()


def device() -> torch.device:
    """Return the device of this rank's tensors: its GPU where there are GPUs, the XLA device, else the CPU.

    Without a distributed configuration it is ``cuda`` or ``mps`` if there is one, else the CPU.
    """
    return _world.device()


def backend() -> str | None:
    """Return the name of the backend in use; None without a distributed configuration."""
    return None if _world.model() is SERIAL else ac.backend()


def available_backends() -> tuple[str, ...]:
    """Return the backends that ``initialize`` and ``spawn`` accept here."""
    return tuple(name for model in registered_computation_models for name in model.available_backends)


def model_name() -> str:
    """Return ``serial``, ``native-dist``, ``xla-dist``, ``horovod-dist`` or ``mpi-dist``."""
    return _world.model().name


def get_world_size() -> int:
    """Return the number of ranks; 1 without a distributed configuration."""
    return 1 if _world.model() is SERIAL else ac.get_world_size()


def get_rank() -> int:
    """Return this rank; 0 without a distributed configuration."""
    return 0 if _world.model() is SERIAL else ac.get_rank()


def get_local_rank() -> int:
    """Return this rank's index among those of its node; 0 without a distributed configuration."""
    return _world.layout().local_rank


def get_nproc_per_node() -> int:
    """Return the number of ranks on a node; 1 without a distributed configuration."""
    return _world.layout().nproc_per_node


def get_nnodes() -> int:
    """Return the number of nodes; 1 without a distributed configuration."""
    return _world.layout().nnodes


def get_node_rank() -> int:
    """Return the index of this node; 0 without a distributed configuration."""
    return _world.layout().node_rank


def hostname() -> str:
    """Return the name of this node."""
    return ac.hostname()


def set_local_rank(index: int) -> None:
    """Give a hint of the local rank, for a context made with torch where ``LOCAL_RANK`` is not set."""
    _layout.hint(index)


def show_config() -> None:
    """Log the distributed configuration, on rank 0."""
    logger = setup_logger(__name__, get_rank())
    logger.info("distributed configuration: %s", model_name())
    logger.info("backend: %s", backend())
    logger.info("device: %s", device().type)
    logger.info("hostname: %s", hostname())
    logger.info("world size: %s", get_world_size())
    logger.info("rank: %s", get_rank())
    logger.info("local rank: %s", get_local_rank())
    logger.info("num processes per_node: %s", get_nproc_per_node())
    logger.info("num nodes: %s", get_nnodes())
    logger.info("node rank: %s", get_node_rank())


# Joining and leaving


def initialize(backend: str, **kwargs: object) -> None:
    """Join the world that the launcher's environment describes (a world of one without a launcher).

    Args:
        backend: one of ``available_backends()``.
        kwargs: ``timeout`` (a ``timedelta`` or seconds), ``init_method``, ``rank``, ``world_size``, and
            whatever else ``ac.initialize`` takes for the backend; ``comm`` goes to Horovod. Others are
            refused.

    Raises:
        ValueError: an unknown backend, or arguments that contradict each other.
        RuntimeError: the launcher's variables are incomplete or contradict each other.
    """
    _check_backend(backend)
    _world.join(backend, kwargs)


def finalize() -> None:
    """Leave the world; a process group that was made with torch is destroyed, too."""
    _world.leave()


def spawn(
    backend: str,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs_dict: Mapping[str, object] | None = None,
    nproc_per_node: int = 1,
    **kwargs: object,
) -> Any:
    """Run ``fn(local_rank, *args, **kwargs_dict)`` on ``nproc_per_node`` ranks, each in its own process.

    ``kwargs`` are those of ``ac.spawn``: ``nnodes``, ``node_rank``, ``master_addr``, ``master_port``,
    ``init_method``, ``start_method``, ``daemon``, ``join``, ``timeout``; ``hosts`` with horovod. On xla-tpu
    ``start_method`` and ``daemon`` have no effect.
    """
    _check_backend(backend)
    if backend in NATIVE.available_backends:
        kwargs = _world.meeting(kwargs)
        if callable(fn) and torch.cuda.device_count():  # anything but a function is refused below
            fn = update_wrapper(partial(_on_its_gpu, fn), fn)
    elif backend in XLA.available_backends:  # how torch_xla's processes start; our ranks are threads
        kwargs = {name: value for name, value in kwargs.items() if name not in ("start_method", "daemon")}
    _world.in_seconds(kwargs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    return ac.spawn(backend, fn, args, kwargs_dict, nproc_per_node, **given)


def _on_its_gpu(fn: Callable[..., object], local_rank: int, *args: object, **kwargs: object) -> object:
    """Return what ``fn`` returns, called on this rank's GPU even if the backend does not choose one."""
    own_device(local_rank)
    return fn(local_rank, *args, **kwargs)


def _check_backend(backend: object) -> None:
    backends = available_backends()
    if backend not in backends:
        raise InvalidArgumentError(f"Backend should be one of '{backends}'")


# One rank before or instead of the others


def one_rank_only(
    rank: int = 0, with_barrier: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the function runs on ``rank`` only, and returns None on the others.

    With ``with_barrier`` the others wait for it; they continue even if it raises there.
    """

    def decorate(func: Callable[..., object]) -> Callable[..., Any]:
        @wraps(func)
        def wrapper(*args: object, **kwargs: object) -> Any:
            try:
                return func(*args, **kwargs) if get_rank() == rank else None
            finally:
                if with_barrier:
                    barrier()

        return wrapper

    return decorate


@contextlib.contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Run a block on ``rank`` before the others: ``with idist.one_rank_first(): download()``.

    With ``local=True``, ``rank`` is a local rank, so one rank of each node goes first. If the block raises
    there, or a rank's node has no such rank, the block does not run on the others: they get a
    ``CollectiveError`` that says why.
    """
    current = get_local_rank() if local else get_rank()
    size = get_nproc_per_node() if local else get_world_size()
    outcome = ""
    try:
        if rank >= size or rank < 0:
            raise InvalidArgumentError(f"rank should be between 0 and {size - 1}, but given {rank}")
        if current == rank:
            yield
    except BaseException as error:
        outcome = f"rank {get_rank()}: {in_full(error)}"
        raise
    finally:
        outcomes = all_gather(outcome)
    if current != rank:
        failed = [text for text in outcomes if text]
        if failed:
            raise CollectiveError(
                f"one_rank_first: the block was not run here, because it failed on {failed[0]}"
            )
        yield

"""The choice of a backend, and its context: a new one, or one next to a default group made with torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

from asynccoll.backends.api.request import Request
from asynccoll.backends.table import C10D, ROWS, check_usable, is_of_torch, normal, row, usual_backend
from asynccoll.environment.detection import LaunchInfo, detect_here
from asynccoll.errors import BackendNotFoundError, InvalidArgumentError
from asynccoll.host.misfits import check_count
from asynccoll.plan.spec import Capabilities
from asynccoll.world.context import Context


def create(
    backend: str | None,
    *,
    init_method: str | None,
    store: dist.Store | None,
    rank: int | None,
    world_size: int | None,
    timeout: float,
    check: str,
    memory: bool,
    options: Mapping[str, object],
) -> Context:
    """Make the context that ``initialize`` asks for."""
    explicit = _check_place(init_method, store, rank, world_size)
    launch = None if explicit else detect_here()
    name = _choose(launch) if backend is None else normal(backend)
    request = Request(name, launch, init_method, store, rank, world_size, timeout, check, memory, options)
    return completed(_factory(name)(request), memory=memory)


def completed(context: Context, *, memory: bool) -> Context:
    """Set up shared memory, if ``memory``, and open the first lane if the backend wants that opened early."""
    try:
        if context.backend.shares_memory and context.has_peers:
            if not memory:
                context.backend.without_memory = "memory=False"
            elif context.thread_rank:
                context.backend.without_memory = "ranks are threads of one process"
            else:
                _share_memory(context)
        if context.backend.opens_early:
            context.world.lane().open()
    except BaseException:
        context.close(abort=True, patience=0.0)
        raise
    return context


def _share_memory(context: Context) -> None:
    """Have ranks of one host exchange CPU tensors through shared memory instead of the backend."""
    from asynccoll.backends.memory.sharing import share

    assert context.clients is not None
    nodes = context.nodes or (0,) * context.world_size
    context.backend = share(context.backend, context.clients, nodes, context.rank, context.timeout)


def _check_place(
    init_method: str | None, store: dist.Store | None, rank: int | None, world_size: int | None
) -> bool:
    """Check the arguments; return whether they, not the launcher's environment, say where the ranks meet."""
    if store is not None and init_method is not None:
        raise InvalidArgumentError("pass init_method or store, not both: each says where the ranks meet")
    if store is not None and (rank is None or world_size is None):
        raise InvalidArgumentError("store= needs rank= and world_size=: a store does not know them")
    if (rank is None) != (world_size is None) and init_method not in (None, "env://"):
        raise InvalidArgumentError(
            f"pass both rank and world_size, or neither; got rank={rank!r} and world_size={world_size!r}"
        )
    if world_size is not None:
        check_count("world_size", world_size)
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank must be from 0 to {world_size - 1}, got {rank}")
    return store is not None or (rank is not None and world_size is not None)


def _choose(launch: LaunchInfo | None) -> str:
    """Return the backend for a launcher, when the user names none."""
    if launch is not None:
        for name, entry in ROWS.items():
            if launch.launcher in entry.launchers:
                return name
    return usual_backend(1 if launch is None else launch.sharing_gpus)


def _factory(name: str) -> Callable[[Request], Context]:
    check_usable(name)
    if is_of_torch(name):
        return _load(C10D)
    entry = row(name)
    try:
        return _load(entry.factory)
    except (ImportError, AttributeError) as error:
        cure = f"; reinstall it: {entry.install}" if entry.install else ""
        raise BackendNotFoundError(f"backend {name!r} cannot be loaded: {error}{cure}") from error


def _load(path: str) -> Callable[[Request], Context]:
    module, _, attribute = path.partition(":")
    return cast("Callable[[Request], Context]", getattr(importlib.import_module(module), attribute))


def options_of(name: str) -> tuple[str, ...] | None:
    """Return the options that backend ``name`` takes, without opening it; None if it does not say."""
    told = getattr(_module(name), "OPTIONS", None)
    return None if told is None else tuple(told)


def _module(name: str) -> ModuleType:
    """Import the module of the backend called ``name``, as the table spells it."""
    path = C10D if is_of_torch(name) else row(name).factory
    try:
        return importlib.import_module(path.partition(":")[0])
    except ImportError as error:
        raise BackendNotFoundError(f"backend {name!r} cannot be loaded: {error}") from error


def capabilities_of(name: str, device: str) -> Capabilities:
    """Return what backend ``name`` supports for tensors on ``device``, without opening it.

    Raises:
        BackendNotFoundError: the backend does not load.
        InvalidArgumentError: another package's backend does not tell its capabilities in advance.
    """
    name = normal(name)
    module = _module(name)
    told = getattr(module, "capabilities", None)
    if told is None:
        raise InvalidArgumentError(
            f"what backend {name!r} supports is unknown until it is opened: {module.__name__} has no "
            "function capabilities(name, device) -> asynccoll.backends.api.Capabilities; call ac.explain in "
            "its world"
        )
    return cast("Capabilities", told(name, device))


def capabilities_among(
    name: str, device: str, *, world_size: int, nodes: int, memory: bool
) -> tuple[Capabilities, str]:
    """Return what a world on ``nodes`` hosts would support for ``device``, and how data would be sent."""
    known = capabilities_of(name, device)
    if device != "cpu" or normal(name) not in ("gloo", "nccl"):
        return known, ""
    from asynccoll.backends.memory.parking import supported
    from asynccoll.backends.memory.tables import ALONE, MEMORY, NEAR

    if world_size == 1:
        return known, f"{known.backend}: {ALONE}"
    if not memory:
        return known, f"{known.backend}: memory=False"
    if not supported():
        return known, f"{known.backend}: memory between processes is used on Linux and x86-64 only"
    if nodes == 1:
        return MEMORY, "through memory that ranks share"
    return replace(known, near=NEAR, hop_bytes=0), f"{known.backend}: these ranks are on {nodes} hosts"


#: By device type: the module that computes its lazy tensors, which have no memory that could be read.
_LAZY = {"xla": "asynccoll.backends.xla.device"}


def lazy(device: torch.device) -> Any:
    """Return the module for lazy tensors of ``device``, which has ``compute(x)`` and ``settled(x)``."""
    return importlib.import_module(_LAZY[device.type])


def alone() -> Context:
    """Make the world of one rank that is used until another one is made."""
    return _factory("serial")(Request("serial", None))


def adopt(
    name: str, store: dist.Store | None, rank: int, world_size: int, timeout: float, check: str
) -> Context:
    """Make a context next to the user's default group; without a store it only has this rank's place."""
    from asynccoll.backends.c10d import backend as c10d

    context = c10d.adopt(name, store, rank, world_size, timeout, check)
    if context.backend.shares_memory and world_size > 1:
        context.backend.without_memory = "torch's default group was adopted; ac.initialize() shares memory"
    return context

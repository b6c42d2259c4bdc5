"""Which backends there are, which one is meant, and how it is loaded: lazily, by name.

A backend is a factory ``create(request) -> Context`` in a module of its own, so that a missing package
costs nothing until somebody asks for it. Others register through the entry-point group
``asynccoll.backends`` (name -> ``module:create``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from asynccoll.backends.api.request import Request
from asynccoll.backends.horovod import library as horovod_library
from asynccoll.environment.detection import MPI_LAUNCHERS, LaunchInfo, detect
from asynccoll.environment.slurm import expand_with_scontrol
from asynccoll.errors import BackendNotFoundError, InvalidArgumentError
from asynccoll.host.misfits import check_count

if TYPE_CHECKING:
    from asynccoll.plan.spec import Capabilities
    from asynccoll.world.context import Context

__all__ = [
    "adopt",
    "alone",
    "available",
    "capabilities_among",
    "capabilities_of",
    "check_usable",
    "create",
    "lazy",
    "needs",
    "others",
    "starting",
    "usual_device",
]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a backend is, whether it can work here, and what to type if it cannot."""

    factory: str
    present: Callable[[], bool]
    install: str
    #: under these launchers it is meant where none is named
    launchers: frozenset[str] = frozenset()
    #: how ``asynccoll.launch`` starts its ranks
    started: str = "processes"
    #: on whose tensors it is mostly used
    device: str = "cpu"


def _has(package: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(package) is not None


_C10D = "asynccoll.backends.c10d.backend:create"
_TABLE: dict[str, _Entry] = {
    "serial": _Entry(
        "asynccoll.backends.serial.backend:create", lambda: True, "", frozenset({"serial"}), started="here"
    ),
    "gloo": _Entry(_C10D, dist.is_gloo_available, "a torch built with gloo"),
    "nccl": _Entry(
        _C10D,
        # Not `is_available`, which starts CUDA: a child that is forked later could not use it.
        lambda: dist.is_nccl_available() and torch.cuda.device_count() > 0,
        "a torch built with CUDA and NCCL, and a GPU: pip install torch on a machine with one",
        device="cuda",
    ),
    "mpi": _Entry(
        "asynccoll.backends.mpi.backend:create",
        _has("mpi4py"),
        "mpi4py and an MPI library: pip install mpi4py mpich",
        MPI_LAUNCHERS,
        started="mpiexec",
    ),
    "horovod": _Entry(
        "asynccoll.backends.horovod.backend:create",
        horovod_library.present,
        horovod_library.INSTALL,
        frozenset({"horovod"}),
        started="horovod",
    ),
    "xla-tpu": _Entry(
        "asynccoll.backends.xla.backend:create",
        _has("torch_xla"),
        "torch_xla and the torch it is made for: pip install torch_xla",
        frozenset({"tpu"}),
        started="replicas",
        device="xla",
    ),
}


def _registered() -> dict[str, _Entry]:
    """The built-in backends and those of other packages."""
    table = dict(_TABLE)
    for point in importlib.metadata.entry_points(group="asynccoll.backends"):
        package = point.dist.name if point.dist is not None else point.module
        table.setdefault(point.name.lower(), _Entry(point.value, lambda: True, f"pip install {package}"))
    return table


def available() -> tuple[str, ...]:
    """The names of the backends whose parts are all here, sorted."""
    return tuple(sorted(name for name, entry in _registered().items() if entry.present()))


def needs() -> dict[str, str]:
    """Of each backend, what is missing for it here and what to type; empty where all its parts are here."""
    table = _registered()
    return {name: "" if (entry := table[name]).present() else entry.install for name in sorted(table)}


def others() -> tuple[str, ...]:
    """The names of the backends that other packages have registered, sorted."""
    return tuple(sorted(_registered().keys() - _TABLE.keys()))


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
    """The context that ``initialize`` asks for."""
    explicit = _check_place(init_method, store, rank, world_size)
    launch = None if explicit else detect(os.environ, expand_hosts=expand_with_scontrol)
    name = _choose(launch) if backend is None else _normal(backend)
    request = Request(name, launch, init_method, store, rank, world_size, timeout, check, memory, options)
    context = _factory(name)(request)
    try:
        _complete(context, memory=memory)
    except BaseException:
        context.close(abort=True, patience=0.0)
        raise
    return context


def _complete(context: Context, *, memory: bool) -> None:
    """Let ranks of one host meet in memory, and open what the backend opens early."""
    if context.backend.shares_memory and context.has_peers:
        if not memory:
            context.backend.without_memory = "memory=False"
        elif context.thread_rank:
            context.backend.without_memory = "ranks are threads of one process"
        else:
            _share_memory(context)
    if context.backend.opens_early:
        context.world.lane().open()


def _share_memory(context: Context) -> None:
    """Let ranks of one host meet in memory, beside the backend."""
    from asynccoll.backends.memory.sharing import share

    assert context.clients is not None
    nodes = context.nodes or (0,) * context.world_size
    context.backend = share(context.backend, context.clients, nodes, context.rank, context.timeout)


def _check_place(
    init_method: str | None, store: dist.Store | None, rank: int | None, world_size: int | None
) -> bool:
    """Whether the caller says where the world is, instead of the launcher's environment."""
    if store is not None and init_method is not None:
        raise InvalidArgumentError("pass init_method or store, not both: each says where the ranks meet")
    if store is not None and (rank is None or world_size is None):
        raise InvalidArgumentError("store= needs rank= and world_size=: a store does not know them")
    if (rank is None) != (world_size is None) and init_method not in (None, "env://"):
        raise InvalidArgumentError(
            f"rank and world_size go together, got rank={rank!r} and world_size={world_size!r}"
        )
    if world_size is not None:
        check_count("world_size", world_size)
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank must be from 0 to {world_size - 1}, got {rank}")
    return store is not None or (rank is not None and world_size is not None)


def _choose(launch: LaunchInfo | None) -> str:
    """The backend for a launcher, when the user names none."""
    if launch is not None:
        for name, entry in _TABLE.items():
            if launch.launcher in entry.launchers:
                return name
    if torch.cuda.is_available() and dist.is_nccl_available():
        ranks_here = 1 if launch is None or launch.own_gpus else launch.local_world_size
        if torch.cuda.device_count() >= ranks_here:
            return "nccl"
    return "gloo"


def _normal(backend: object) -> str:
    if not isinstance(backend, str):
        raise InvalidArgumentError(f"backend must be a name or None, got {backend!r}")
    return backend.strip().lower()


def check_usable(name: str) -> None:
    """Raise ``BackendNotFoundError`` unless the backend's parts are all here."""
    if not _is_of_torch(name) and not (entry := _entry(name)).present():
        raise BackendNotFoundError(
            f"backend {name!r} is not usable here; it needs {entry.install}. Available: "
            f"{', '.join(available())}"
        )


def _is_of_torch(name: str) -> bool:
    """Whether it is of the form ``cpu:gloo,cuda:nccl``, or a backend that a package registered with torch."""
    return ":" in name or name.upper() in dist.Backend._plugins


def _factory(name: str) -> Callable[[Request], Context]:
    check_usable(name)
    if _is_of_torch(name):
        return _load(_C10D)
    entry = _entry(name)
    try:
        return _load(entry.factory)
    except (ImportError, AttributeError) as error:
        cure = f"; install it anew: {entry.install}" if entry.install else ""
        raise BackendNotFoundError(f"backend {name!r} does not load: {error}{cure}") from error


def _entry(name: str) -> _Entry:
    if name in _TABLE:  # before other packages' metadata is read, which takes as long as all the rest
        return _TABLE[name]
    table = _registered()
    if name not in table:
        raise BackendNotFoundError(
            f"unknown backend {name!r}; there are {', '.join(sorted(table))} (in any case), backends "
            "registered with torch.distributed, and forms like 'cpu:gloo,cuda:nccl'"
        )
    return table[name]


def _load(path: str) -> Callable[[Request], Context]:
    module, _, attribute = path.partition(":")
    return cast("Callable[[Request], Context]", getattr(importlib.import_module(module), attribute))


def capabilities_of(name: str, device: str) -> Capabilities:
    """What backend ``name`` does for tensors on ``device``, without opening it.

    Raises:
        BackendNotFoundError: it does not load.
        InvalidArgumentError: it is another package's, which does not tell.
    """
    name = _normal(name)
    path = _C10D if _is_of_torch(name) else _entry(name).factory
    try:
        module = importlib.import_module(path.partition(":")[0])
    except ImportError as error:
        raise BackendNotFoundError(f"backend {name!r} does not load: {error}") from error
    told = getattr(module, "capabilities", None)
    if told is None:
        raise InvalidArgumentError(
            f"backend {name!r} does not tell what it can do before it is opened: {module.__name__} has no "
            "function capabilities(name, device) -> asynccoll.backends.api.Capabilities; ask ac.explain in "
            "its world"
        )
    return cast("Capabilities", told(name, device))


def capabilities_among(
    name: str, device: str, *, world_size: int, nodes: int, memory: bool
) -> tuple[Capabilities, str]:
    """What a world on so many hosts would do for tensors on ``device``, and which way they would go."""
    known = capabilities_of(name, device)
    if device != "cpu" or world_size == 1 or _normal(name) not in ("gloo", "nccl"):
        return known, ""
    from asynccoll.backends.memory.parking import supported
    from asynccoll.backends.memory.tables import MEMORY, NEAR

    if not memory:
        return known, f"{known.backend}: memory=False"
    if not supported():
        return known, f"{known.backend}: memory between processes is used on Linux and x86-64 alone"
    if nodes == 1:
        return MEMORY, "through memory that ranks share"
    return replace(known, near=NEAR, hop_bytes=0), f"{known.backend}: these ranks are on {nodes} hosts"


def starting(name: str) -> str:
    """How the ranks of backend ``name`` are started: ``"processes"`` unless its row says otherwise."""
    entry = _TABLE.get(name)
    return "processes" if entry is None else entry.started


def usual_device(name: str) -> str:
    """The type of device on whose tensors backend ``name`` is mostly used."""
    entry = _TABLE.get(_normal(name))
    return "cpu" if entry is None else entry.device


#: Devices whose tensors are computed later and have no memory that could be read: who computes them.
_LAZY = {"xla": "asynccoll.backends.xla.device"}


def lazy(device: torch.device) -> Any:
    """What knows the lazy tensors of ``device``: ``compute(x)`` and ``settled(x)``."""
    return importlib.import_module(_LAZY[device.type])


def alone() -> Context:
    """The world of one that is there where nobody has made any."""
    return _factory("serial")(Request("serial", None))


def adopt(
    name: str, store: dist.Store | None, rank: int, world_size: int, timeout: float, check: str
) -> Context:
    """A context beside the default group that the user made with torch; without a store only a place."""
    from asynccoll.backends.c10d import backend as c10d

    context = c10d.adopt(name, store, rank, world_size, timeout, check)
    if context.backend.shares_memory and world_size > 1:
        context.backend.without_memory = "torch's default group was adopted; ac.initialize() shares memory"
    return context

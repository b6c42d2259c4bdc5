"""Which backends there are: each row says where one is, what it needs and how its ranks are started.

A backend is a factory ``create(request) -> Context`` in a module of its own, so that a missing package
costs nothing until somebody asks for it; nor does torch, which a launcher need not load. Others register
through the entry-point group ``asynccoll.backends`` (name -> ``module:create``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from asynccoll.backends.horovod import library as horovod_library
from asynccoll.environment.detection import MPI_LAUNCHERS
from asynccoll.errors import BackendNotFoundError, InvalidArgumentError

__all__ = [
    "C10D",
    "ROWS",
    "Row",
    "available",
    "check_usable",
    "is_of_torch",
    "needs",
    "normal",
    "others",
    "row",
    "starting",
    "usual_device",
]


@dataclass(frozen=True, slots=True)
class Row:
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


def _torch_has_gloo() -> bool:
    import torch.distributed as dist

    return dist.is_gloo_available()


def _torch_has_nccl() -> bool:
    import torch
    import torch.distributed as dist

    # Not `is_available`, which starts CUDA: a child that is forked later could not use it.
    return dist.is_nccl_available() and torch.cuda.device_count() > 0


#: torch's own backends, and those that packages register with torch.
C10D = "asynccoll.backends.c10d.backend:create"
ROWS: dict[str, Row] = {
    "serial": Row(
        "asynccoll.backends.serial.backend:create", lambda: True, "", frozenset({"serial"}), started="here"
    ),
    "gloo": Row(C10D, _torch_has_gloo, "a torch built with gloo"),
    "nccl": Row(
        C10D,
        _torch_has_nccl,
        "a torch built with CUDA and NCCL, and a GPU: pip install torch on a machine with one",
        device="cuda",
    ),
    "mpi": Row(
        "asynccoll.backends.mpi.backend:create",
        _has("mpi4py"),
        "mpi4py and an MPI library: pip install mpi4py mpich",
        MPI_LAUNCHERS,
        started="mpiexec",
    ),
    "horovod": Row(
        "asynccoll.backends.horovod.backend:create",
        horovod_library.present,
        horovod_library.INSTALL,
        frozenset({"horovod"}),
        started="horovod",
    ),
    "xla-tpu": Row(
        "asynccoll.backends.xla.backend:create",
        _has("torch_xla"),
        "torch_xla and the torch it is made for: pip install torch_xla",
        frozenset({"tpu"}),
        started="replicas",
        device="xla",
    ),
}


def _registered() -> dict[str, Row]:
    """The built-in backends and those of other packages."""
    table = dict(ROWS)
    for point in importlib.metadata.entry_points(group="asynccoll.backends"):
        package = point.dist.name if point.dist is not None else point.module
        table.setdefault(point.name.lower(), Row(point.value, lambda: True, f"pip install {package}"))
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
    return tuple(sorted(_registered().keys() - ROWS.keys()))


def normal(backend: object) -> str:
    """The name as it stands in the table."""
    if not isinstance(backend, str):
        raise InvalidArgumentError(f"backend must be a name or None, got {backend!r}")
    return backend.strip().lower()


def check_usable(name: str) -> None:
    """Raise ``BackendNotFoundError`` unless the backend's parts are all here."""
    if not is_of_torch(name) and not (entry := row(name)).present():
        raise BackendNotFoundError(
            f"backend {name!r} is not usable here; it needs {entry.install}. Available: "
            f"{', '.join(available())}"
        )


def is_of_torch(name: str) -> bool:
    """Whether it is of the form ``cpu:gloo,cuda:nccl``, or a backend that a package registered with torch."""
    import torch.distributed as dist

    return ":" in name or name.upper() in dist.Backend._plugins


def row(name: str) -> Row:
    """That of the backend of this name.

    Raises:
        BackendNotFoundError: there is none.
    """
    if name in ROWS:  # before other packages' metadata is read, which takes as long as all the rest
        return ROWS[name]
    table = _registered()
    if name not in table:
        raise BackendNotFoundError(
            f"unknown backend {name!r}; there are {', '.join(sorted(table))} (in any case), backends "
            "registered with torch.distributed, and forms like 'cpu:gloo,cuda:nccl'"
        )
    return table[name]


def starting(name: str) -> str:
    """How the ranks of backend ``name`` are started: ``"processes"`` unless its row says otherwise."""
    entry = ROWS.get(name)
    return "processes" if entry is None else entry.started


def usual_device(name: str) -> str:
    """The type of device on whose tensors backend ``name`` is mostly used."""
    entry = ROWS.get(normal(name))
    return "cpu" if entry is None else entry.device

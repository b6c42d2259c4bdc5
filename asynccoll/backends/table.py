"""The table of backends: each row says where a backend is, what it needs and how its ranks are started.

A backend is a factory ``create(request) -> Context`` in a module that is imported only when the backend is
used, so a missing package costs nothing until then. torch, too, is imported only when needed, since a
launcher need not load it. Other packages register backends in the entry-point group ``asynccoll.backends``
(name -> ``module:create``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from asynccoll.backends.horovod import library as horovod_library
from asynccoll.environment.detection import MPI_LAUNCHERS
from asynccoll.errors import BackendNotFoundError, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Row:
    """Where a backend is, whether it can work here, and how to install what it lacks."""

    factory: str
    present: Callable[[], bool]
    install: str
    #: the launchers under which this backend is the default
    launchers: frozenset[str] = frozenset()
    #: how ``asynccoll.launch`` starts its ranks
    started: str = "processes"
    #: the type of device that its tensors are usually on
    device: str = "cpu"


def _has(package: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(package) is not None


def _torch_has_gloo() -> bool:
    import torch.distributed as dist

    return dist.is_gloo_available()


def _torch_has_nccl() -> bool:
    import torch
    import torch.distributed as dist

    # Not `is_available`, which initializes CUDA: a child forked later could not use it.
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
    """Return the built-in backends and those of other packages."""
    table = dict(ROWS)
    for point in importlib.metadata.entry_points(group="asynccoll.backends"):
        package = point.dist.name if point.dist is not None else point.module
        table.setdefault(point.name.lower(), Row(point.value, lambda: True, f"pip install {package}"))
    return table


def available() -> tuple[str, ...]:
    """Return the sorted names of the backends whose requirements are met here."""
    return tuple(sorted(name for name, entry in _registered().items() if entry.present()))


def needs() -> dict[str, str]:
    """Return, for each backend, what it needs and how to install that; "" if its requirements are met."""
    table = _registered()
    return {name: "" if (entry := table[name]).present() else entry.install for name in sorted(table)}


def others() -> tuple[str, ...]:
    """Return the sorted names of the backends that other packages have registered."""
    return tuple(sorted(_registered().keys() - ROWS.keys()))


def normal(backend: object) -> str:
    """Return the name as the table spells it."""
    if not isinstance(backend, str):
        raise InvalidArgumentError(f"backend must be a name, got {backend!r}")
    return backend.strip().lower()


def check_usable(name: str) -> None:
    """Raise ``BackendNotFoundError`` unless the backend's requirements are met here."""
    if not is_of_torch(name) and not (entry := row(name)).present():
        raise BackendNotFoundError(
            f"backend {name!r} is not usable here; it needs {entry.install}. Available: "
            f"{', '.join(available())}"
        )


def usable(backend: object) -> str:
    """Return the name, as the table spells it, of a backend that can be used here; else raise as above."""
    name = normal(backend)
    check_usable(name)
    return name


def is_of_torch(name: str) -> bool:
    """Whether ``name`` has the form ``cpu:gloo,cuda:nccl``, or a package has registered it with torch."""
    import torch.distributed as dist

    return ":" in name or name.upper() in dist.Backend._plugins


def row(name: str) -> Row:
    """Return the row of the backend called ``name``.

    Raises:
        BackendNotFoundError: no backend is called that.
    """
    if name in ROWS:  # first, since reading other packages' metadata takes as long as everything else
        return ROWS[name]
    table = _registered()
    if name not in table:
        raise BackendNotFoundError(
            f"unknown backend {name!r}; there are {', '.join(sorted(table))} (in any case), backends "
            "registered with torch.distributed, and forms like 'cpu:gloo,cuda:nccl'"
        )
    return table[name]


def starting(name: str) -> str:
    """Return how the ranks of backend ``name`` are started: ``"processes"`` unless its row says otherwise."""
    entry = ROWS.get(normal(name))
    return "processes" if entry is None else entry.started


def usual_backend(ranks: int) -> str:
    """Return torch's backend for ``ranks`` that share GPUs: ``"nccl"`` if there is one for each."""
    import torch

    return "nccl" if _torch_has_nccl() and torch.cuda.device_count() >= ranks else "gloo"


def usual_device(name: str) -> str:
    """Return the type of device that the tensors of backend ``name`` are usually on."""
    entry = ROWS.get(normal(name))
    return "cpu" if entry is None else entry.device

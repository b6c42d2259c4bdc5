"""Starting the ranks of a job through the engine that can: a table, one row per engine.

We write no supervisor; an engine delegates to a launcher that exists. What the command line looks
like is in ``asynccoll.cli``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asynccoll.errors import UnsupportedOpError

__all__ = ["RunRequest", "run"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to start: a program, its arguments, and options under torchrun's names."""

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    backend: str | None = None
    options: Mapping[str, str | bool] = field(default_factory=dict)


def _run_elastic(request: RunRequest) -> int:
    from asynccoll.launch.elastic import run as run_elastic

    return run_elastic(request)


def _run_mpiexec(request: RunRequest) -> int:
    from asynccoll.launch.mpirun import run_mpi

    return run_mpi(request)


def _run_horovodrun(request: RunRequest) -> int:
    from asynccoll.launch.mpirun import run_horovod

    return run_horovod(request)


Engine = Callable[[RunRequest], int]

#: Engines by name; each starts all ranks, waits for them and returns the exit code.
ENGINES: dict[str, Engine] = {
    "elastic": _run_elastic,
    "mpiexec": _run_mpiexec,
    "horovodrun": _run_horovodrun,
}

#: Backends whose ranks something other than torch elastic has to start.
ENGINE_OF_BACKEND = {"mpi": "mpiexec", "horovod": "horovodrun"}


def run(request: RunRequest) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed.

    Raises:
        UnsupportedOpError: no engine can start ranks of the backend asked for.
    """
    if (request.backend or "").lower() == "xla-tpu":
        raise UnsupportedOpError(
            "`asynccoll run` starts processes, but on the CPU the ranks of xla-tpu are threads of one, and "
            "on TPU torch_xla starts them: start the script with plain python, and the ranks in it with "
            "ac.Parallel('xla-tpu', nproc_per_node=n) or ac.spawn"
        )
    name = ENGINE_OF_BACKEND.get((request.backend or "").lower(), "elastic")
    engine = ENGINES.get(name)
    if engine is None:
        raise UnsupportedOpError(
            f"`asynccoll run` cannot start ranks of backend {request.backend!r}: that needs the"
            f" engine {name!r}, and there are {', '.join(ENGINES)}. Start the script with"
            f" `{name}` itself"
        )
    return engine(request)

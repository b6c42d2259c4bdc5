"""Starts the ranks of a job through the engine that can: a table, one row per engine.

There is no supervisor of our own; an engine delegates to an existing launcher. The command line is in
``asynccoll.cli``.
"""

from __future__ import annotations

from collections.abc import Callable

from asynccoll.backends.table import starting
from asynccoll.errors import UnsupportedOpError
from asynccoll.launch.request import RunRequest

__all__ = ["run"]


def _run_elastic(request: RunRequest) -> int:
    from asynccoll.launch.elastic import run as run_elastic

    return run_elastic(request)


def _run_mpiexec(request: RunRequest) -> int:
    from asynccoll.launch.libraries import run_mpi

    return run_mpi(request)


def _run_horovodrun(request: RunRequest) -> int:
    from asynccoll.launch.libraries import run_horovod

    return run_horovod(request)


def _refuse_xla(request: RunRequest) -> int:
    raise UnsupportedOpError(
        "`asynccoll run` starts processes, but on the CPU the ranks of xla-tpu are threads of one, and "
        "on TPU torch_xla starts them: start the script with plain python, and the ranks in it with "
        "ac.Parallel('xla-tpu', nproc_per_node=n) or ac.spawn"
    )


Engine = Callable[[RunRequest], int]

#: By how ``backends.table`` says that a backend's ranks are started; each returns the exit code.
ENGINES: dict[str, Engine] = {
    "here": _run_elastic,
    "processes": _run_elastic,
    "mpiexec": _run_mpiexec,
    "horovod": _run_horovodrun,
    "replicas": _refuse_xla,
}


def run(request: RunRequest) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed.

    Raises:
        UnsupportedOpError: nothing starts ranks of the backend asked for.
    """
    return ENGINES[request.engine or starting(request.backend or "")](request)

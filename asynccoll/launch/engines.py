"""Starts the ranks of a job through the engine that can, by how ``backends.table`` says they are started.

There is no supervisor of our own; an engine delegates to an existing launcher. The command line is in
``asynccoll.cli``.
"""

from __future__ import annotations

from asynccoll.backends.table import starting
from asynccoll.errors import UnsupportedOpError
from asynccoll.launch.request import RunRequest


def run(request: RunRequest) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed.

    Raises:
        UnsupportedOpError: nothing starts ranks of the backend asked for.
    """
    engine = request.engine or starting(request.backend or "")
    if engine == "replicas":
        raise UnsupportedOpError(
            "`asynccoll run` starts processes, but on the CPU the ranks of xla-tpu are threads of one, and "
            "on TPU torch_xla starts them: start the script with plain python, and the ranks in it with "
            "ac.Parallel('xla-tpu', nproc_per_node=n) or ac.spawn"
        )
    if engine in ("here", "processes"):
        from asynccoll.launch import elastic

        return elastic.run(request)
    from asynccoll.launch import libraries

    return libraries.run(request, engine)

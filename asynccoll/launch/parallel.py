"""``Parallel``: one script for ranks that a launcher started and for ranks it starts itself.

The contract is that of ``ignite.distributed.Parallel``: with ``nproc_per_node`` the ranks are spawned
by ``run``, without it this process is one rank of a world that torchrun, mpiexec, SLURM or ``asynccoll
run`` has made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from asynccoll.backends.table import usable
from asynccoll.environment.detection import detect_here
from asynccoll.environment.nodes import Nodes
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.endings import is_failure
from asynccoll.host.misfits import fitting
from asynccoll.launch.calling import check_called, complete
from asynccoll.launch.spawn import ABOUT_STARTING, check_keywords, spawn
from asynccoll.runtime.process import finalize, get_local_rank, get_world_size, initialize

_log = logging.getLogger("asynccoll.launch")


class Parallel:
    """Runs a function on every rank: ``with ac.Parallel("gloo", nproc_per_node=2) as parallel:``.

    >>> def train(local_rank, config): ...
    >>> with ac.Parallel(backend="gloo", nproc_per_node=2) as parallel:
    ...     parallel.run(train, config)

    Under a launcher (torchrun, ``asynccoll run``, mpiexec, srun) the block joins its world and ``run``
    calls the function; ``nproc_per_node`` may then be omitted, and if given must be what the launcher
    started. Without a launcher, ``run`` spawns ``nproc_per_node`` ranks (see ``ac.spawn``).

    Args:
        backend: as for ``ac.initialize``. None: no world at all, ``run`` just calls the function.
        nproc_per_node: how many ranks to spawn on this node.
        nnodes, node_rank: the number of nodes and this one's, where each node runs this script.
        master_addr, master_port: where the ranks of several nodes meet.
        init_method: instead of these; as for ``ac.initialize``.
        spawn_kwargs: further arguments of ``ac.spawn`` (``start_method``, ...) and ``ac.initialize``
            (``timeout``, ``check``, ...).

    Raises:
        InvalidArgumentError: arguments that contradict each other (a ``ValueError``).
        BackendNotFoundError: the backend is unknown or its package missing.
    """

    @fitting
    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        **spawn_kwargs: Any,
    ) -> None:
        given = {
            "nproc_per_node": nproc_per_node,
            "nnodes": nnodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": master_port,
        }
        said = {name: value for name, value in given.items() if value is not None}
        if backend is None and (said or init_method is not None or spawn_kwargs):
            names = [*said, *(["init_method"] if init_method is not None else []), *spawn_kwargs]
            raise InvalidArgumentError(
                f"without a backend there are no ranks, so {', '.join(names)} have no effect"
            )
        self.backend: str | None = None if backend is None else usable(backend)
        if self.backend is not None:
            check_keywords(self.backend, spawn_kwargs)
        self.init_method = init_method
        self._options = spawn_kwargs
        self._spawned: dict[str, Any] | None = None
        if nproc_per_node is not None:
            Nodes(nproc_per_node, nnodes, node_rank, master_addr, master_port, init_method)
            if not _launched(nproc_per_node):
                self._spawned = said
        if self._spawned is None:  # no rank is started here, so options about starting do not apply
            self._options = {name: x for name, x in spawn_kwargs.items() if name not in ABOUT_STARTING}

    def __enter__(self) -> Parallel:
        if self.backend is not None and self._spawned is None:
            initialize(self.backend, init_method=self.init_method, **self._options)
            _log.info("joined a world of %d on %s", get_world_size(), self.backend)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.backend is not None and self._spawned is None:
            finalize(abort=is_failure(error))

    def run(self, func: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank; returns when this node's are done.

        An ``async def`` is run by ``asyncio.run``.

        Raises:
            SpawnError: a spawned rank failed; the text has its traceback.
            InvalidArgumentError: ``func`` is async, and an event loop is already running here.
        """
        check_called(func)
        if self._spawned is None:
            complete(func, self._local_rank(), *args, **kwargs)
            return
        options = self._starting()
        _log.info("spawning with %s", options)
        spawn(str(self.backend), func, args, kwargs, **options)

    def _starting(self) -> dict[str, Any]:
        """Return what ``spawn`` is told about how the ranks start."""
        meeting = {} if self.init_method is None else {"init_method": self.init_method}
        return {**(self._spawned or {}), **meeting, **self._options}

    def _local_rank(self) -> int:
        return detect_here().local_rank if self.backend is None else get_local_rank()


def _launched(nproc_per_node: int) -> bool:
    """Whether a launcher has started the ranks already; their number must then be the one asked for."""
    launch = detect_here()
    # A single SLURM task, or a TPU host, says nothing about the ranks that the script is to start there.
    alone = launch.launcher in ("slurm", "tpu") and launch.world_size == 1
    if launch.launcher == "serial" or alone:
        return False
    if launch.local_world_size != nproc_per_node:
        raise InvalidArgumentError(
            f"nproc_per_node={nproc_per_node}, but {launch.launcher} has started {launch.local_world_size} "
            "ranks on this node; leave nproc_per_node out to join them, or start the script with plain python"
        )
    return True

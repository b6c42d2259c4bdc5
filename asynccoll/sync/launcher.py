"""``ignite.distributed.launcher``: ``ac.Parallel`` with ignite's checks, texts and log lines."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import asynccoll as ac
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.endings import is_failure
from asynccoll.launch.calling import complete
from asynccoll.sync import utils as idist
from asynccoll.sync import world
from asynccoll.sync.logs import setup_logger

__all__ = ["Parallel"]


class Parallel(ac.Parallel):
    """Runs a function on every rank: ``with idist.Parallel("gloo", nproc_per_node=2) as parallel:``.

    With ``nproc_per_node`` the ranks are spawned by ``run``; under a launcher (torchrun, srun, horovodrun,
    mpiexec) the block joins its world. See ``ac.Parallel``; with ``backend=None`` there is no world, and
    ``run`` calls the function with 0.

    Raises:
        ValueError: arguments that contradict each other, in ignite's words.
    """

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
        given: dict[str, Any] = {
            "nproc_per_node": nproc_per_node,
            "nnodes": nnodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": master_port,
        }
        if backend is None:
            _check_nothing(given)
            init_method, spawn_kwargs = None, {}
        elif backend not in idist.available_backends():
            raise InvalidArgumentError(
                f"Unknown backend '{backend}'. Available backends: {idist.available_backends()}"
            )
        elif nproc_per_node is not None:
            _check_spawned(**given, init_method=init_method)
        world.in_seconds(spawn_kwargs)
        super().__init__(backend, **given, init_method=init_method, **spawn_kwargs)

    def __enter__(self) -> Parallel:
        joins = self.backend is not None and self._spawned is None
        if joins:
            idist.initialize(str(self.backend), init_method=self.init_method, **self._options)
        self._logger = setup_logger(f"{__name__}.{type(self).__name__}", idist.get_rank())
        if joins:
            self._logger.info("Initialized processing group with backend: '%s'", self.backend)
        elif self._spawned is not None:
            self._logger.info("Initialized distributed launcher with backend: '%s'", self.backend)
            lines = "\n\t".join(f"{name}: {value}" for name, value in self._starting().items())
            self._logger.info("- Parameters to spawn processes: \n\t%s", lines)
        return self

    def _starting(self) -> dict[str, Any]:
        """Return what is passed to ``spawn`` and logged: with ignite's defaults, in ignite's order."""
        options = {"nproc_per_node": 1, "nnodes": 1, "node_rank": 0, **super()._starting()}
        return {name: value for name, value in options.items() if value is not None}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.backend is not None and self._spawned is None:
            self._logger.info("Finalized processing group with backend: '%s'", self.backend)
            world.leave(abort=is_failure(error))

    def run(self, func: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank; return when those of this node are done.

        An ``async def`` is run by ``asyncio.run``.

        Raises:
            SpawnError: a spawned rank failed; the text has its traceback.
        """
        if self._spawned is not None:
            self._logger.info("Spawn function '%s' in %s processes", func, self._spawned["nproc_per_node"])
            idist.spawn(str(self.backend), func, args, kwargs, **self._starting())
        else:
            self._logger.info("- Run '%s' in %s processes", func, idist.get_world_size())
            complete(func, idist.get_local_rank(), *args, **kwargs)
        self._logger.info("End of run")


def _check_nothing(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(
                f"If backend is None, argument '{name}' should be also None, but given {value}"
            )


def _check_spawned(
    nproc_per_node: int,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    init_method: str | None,
) -> None:
    """ignite's checks, in its order and words."""
    if nproc_per_node < 1:
        raise InvalidArgumentError(f"Argument nproc_per_node should positive, but given {nproc_per_node}")
    nnodes = 1 if nnodes is None else nnodes
    if nnodes < 1:
        raise InvalidArgumentError(f"Argument nnodes should positive, but given {nnodes}")
    if node_rank is None:
        if nnodes > 1:
            raise InvalidArgumentError(
                "If number of nodes larger than one, arguments node_rank should be given"
            )
        node_rank = 0
    if node_rank >= nnodes or node_rank < 0:
        raise InvalidArgumentError(
            f"Argument node_rank should be between 0 and {nnodes - 1}, but given {node_rank}"
        )
    if nnodes > 1 and (master_addr is None or master_port is None) and init_method is None:
        raise InvalidArgumentError(
            "If number of nodes larger than one, arguments master_addr and master_port or init_method "
            f"should be specified, but given master_addr={master_addr}, master_port={master_port} and "
            f"init_method={init_method}."
        )

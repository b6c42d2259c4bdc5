"""Ranks that are replica threads of torch_xla's CPU client: one process per world.

The process runs the program of a rank (`ranks.py`) in each thread, each with its own connection to the test.
An abort of the runtime ends this process, never the test's.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patience import patient

if TYPE_CHECKING:
    from worlds import World

HERE = Path(__file__).parent


def start(world: World, address: str) -> list[Any]:
    """Start one process, whose stacks and standard error serve for every rank."""
    from worlds import _Process, rank_environment

    environ = rank_environment()
    environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(world.size),
        XLA_THREAD_POOL_SIZE=str(world.size + 4),
    )
    with world.directory.joinpath("stderr-0").open("wb") as stderr:
        popen = subprocess.Popen(
            [sys.executable, str(Path(__file__)), address, world.backend, str(world.directory)],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environ,
        )
    for rank in range(1, world.size):
        for kind in ("stderr", "stacks"):
            world.directory.joinpath(f"{kind}-{rank}").symlink_to(f"{kind}-0")
    return [_Process(rank, popen, world.directory) for rank in range(world.size)]


def options() -> dict[str, Any]:
    """Return the options of `initialize`; the runtime knows the rest."""
    return {"timeout": patient(60)}


def main(address: str, backend: str, directory: str) -> None:
    """Run a rank in each replica thread of this process."""
    from multiprocessing.connection import Client

    import ranks
    from asynccoll.backends.xla.threads import run_replicas

    ranks.begin(Path(directory, "stacks-0"))

    def rank_thread(rank: int) -> None:
        connection = Client(address, "AF_UNIX")
        ranks.report_to(connection)("hello", rank, os.getpid())
        size, given = pickle.loads(connection.recv_bytes())
        ranks.serve(connection, ranks.Place(backend, rank, size), given)

    run_replicas(rank_thread)


if __name__ == "__main__":
    main(*sys.argv[1:])

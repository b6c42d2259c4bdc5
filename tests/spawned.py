"""Functions that spawned ranks run, in a separate module because they are looked up by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import asynccoll as ac


def tell(local_rank: int, directory: str, *args: Any, **kwargs: Any) -> None:
    """Write down the place of this rank, and the arguments of the call."""
    total = ac.all_reduce(ac.get_rank() + 1).wait()
    said = {
        "local": local_rank,
        "rank": ac.get_rank(),
        "size": ac.get_world_size(),
        "per node": ac.get_nproc_per_node(),
        "backend": ac.backend(),
        "total": total,
        "args": args,
        "kwargs": kwargs,
    }
    Path(directory, str(ac.get_rank())).write_text(repr(said))


def tell_sync(local_rank: int, directory: str, *args: Any, **kwargs: Any) -> None:
    """Write down the same through the interface of ignite."""
    import asynccoll.sync as idist

    said = {
        "local": (local_rank, idist.get_local_rank()),
        "rank": idist.get_rank(),
        "size": idist.get_world_size(),
        "nodes": (idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank()),
        "model": (idist.model_name(), idist.backend()),
        "torch": (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_RANK")),
        "port": os.environ.get("MASTER_PORT"),
        "total": idist.all_reduce(idist.get_rank() + 1),
        "args": args,
        "kwargs": kwargs,
    }
    Path(directory, str(idist.get_rank())).write_text(repr(said))


def told(directory: Path) -> list[Any]:
    """Return what the ranks wrote, by rank."""
    return [eval(path.read_text()) for path in sorted(directory.iterdir())]


def fail(local_rank: int, culprit: int) -> None:
    """Raise on one rank; the others wait for it."""
    ac.all_reduce(1).wait()
    if local_rank == culprit:
        raise LookupError(f"of rank {local_rank}")
    ac.all_reduce(1).wait()


def fail_while_others(local_rank: int, culprit: int, do: str, directory: str) -> None:
    """Raise on one rank; the others exit, or wait for something else."""
    if local_rank == culprit:
        raise LookupError(f"of rank {local_rank}")
    if do == "exit":
        sys.exit(0)
    threading.Event().wait(120)
    Path(directory, "waited").touch()


async def tell_awaited(local_rank: int, directory: str, **kwargs: Any) -> None:
    """Write down the result of an awaited call."""
    total = await ac.all_reduce(ac.get_rank() + 1)
    Path(directory, str(ac.get_rank())).write_text(repr((local_rank, ac.get_rank(), total, kwargs)))


def leave_in_flight(local_rank: int) -> None:
    """Leave a call in flight that no other rank makes."""
    ac.all_reduce(torch.ones(1), lane=f"of {local_rank}").detach()


async def fail_awaited(local_rank: int, culprit: int) -> None:
    """Raise on one rank; the others wait for it."""
    await ac.all_reduce(1)
    if local_rank == culprit:
        raise LookupError(f"of rank {local_rank}")
    await ac.all_reduce(1)


def die(local_rank: int) -> None:
    """Kill one rank."""
    ac.all_reduce(1).wait()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ac.all_reduce(1).wait()


def linger(local_rank: int, directory: str) -> None:
    """Signal that this rank has started, then stay until a file says to go."""
    Path(directory, f"here-{local_rank}").write_text(str(os.getpid()))
    while not Path(directory, "go").exists():
        time.sleep(0.01)
    Path(directory, f"stayed-{local_rank}").touch()

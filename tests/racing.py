"""Programs with mistakes such as a race between statements, to test that exploration finds them."""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing import parent_process

import asynccoll as ac

counts: dict[int, int] = {}


def count(rank: int) -> None:
    """Add one, not atomically: wrong if another thread does so meanwhile."""
    before = counts[rank]
    counts[rank] = before + 1


async def main(rank: int) -> None:
    """Count to two with two threads on each rank."""
    counts[rank] = 0
    await asyncio.gather(*(asyncio.to_thread(count, rank) for _ in range(2)))
    await ac.barrier()
    assert counts[rank] == 2, counts


async def crossed(rank: int) -> None:
    """Use one lane in two tasks, which is refused."""

    async def step(seconds: float) -> None:
        await asyncio.sleep(seconds)
        await ac.all_reduce(1)

    await asyncio.gather(step(0.001 * rank), step(0.0005))


async def fine(rank: int) -> None:
    """Do nothing wrong."""
    for _ in range(3):
        assert await ac.all_reduce(1) == ac.get_world_size()


async def failing(rank: int) -> None:
    """Raise."""
    raise LookupError(f"of {rank}")


tried: list[int] = []


async def dying(rank: int) -> None:
    """Kill the process, if another one has started it, in the third schedule that it tries."""
    tried.append(rank)
    if tried.count(0) == 3 and parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)


async def script() -> None:
    """Initialize and finalize like a script."""
    ac.initialize()
    await ac.barrier()
    ac.finalize()


async def skipping(rank: int) -> list[float]:
    """Skip one of several equal calls on rank 1, which makes as many calls as the others in the end."""
    sums = []
    for step in range(4):
        sums.append(await ac.all_reduce(1.0))
        if not (rank == 1 and step == 2):
            sums.append(await ac.all_reduce(float(step)))
    if rank == 1:
        sums.append(await ac.all_reduce(0.0))
    return sums

"""Event loop latency while collectives are awaited: a 1 ms heartbeat, on asyncio, uvloop and trio.

Run it on two ranks: ``make bench BENCH=responsiveness``. It prints how late the heartbeat is while a stream
of 4 KiB all_reduces runs, or 64 MiB at a time, compared with the raw call whose future's callback wakes the
loop. It also prints the processor time of this process while it waits for a late rank. uvloop is measured if
it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import anyio
import sniffio
import torch
import torch.distributed as dist
import trio

import asynccoll as ac

HEARTBEAT_SECONDS = 0.001
IDLE_SECONDS = 1.0
#: The all_reduces of each load: elements of float32, and how many, one after the other.
LOADS = {"4 KiB, a stream": (1 << 10, 300), "64 MiB": (16 << 20, 3)}
LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {}),
    **({"uvloop": ("asyncio", {"use_uvloop": True})} if importlib.util.find_spec("uvloop") else {}),
    "trio": ("trio", {}),
}

Operation = Callable[[], Awaitable[object]]


def waker(done: anyio.Event) -> Callable[[], object]:
    """Return a function with which another thread sets ``done``, by the running loop's own means."""
    if sniffio.current_async_library() == "trio":
        token = trio.lowlevel.current_trio_token()
        return lambda: token.run_sync_soon(done.set)
    loop = asyncio.get_running_loop()
    return lambda: loop.call_soon_threadsafe(done.set)


async def raw_callback(x: torch.Tensor) -> None:
    """Await the raw call in the plain way: its future's callback wakes the loop."""
    done = anyio.Event()
    wake = waker(done)
    dist.all_reduce(x, async_op=True).get_future().add_done_callback(lambda _: wake())
    await done.wait()


async def ours(x: torch.Tensor, out: torch.Tensor | None) -> None:
    await ac.all_reduce(x, out=out)


def operations_on(x: torch.Tensor) -> dict[str, Operation]:
    return {
        "raw callback, in place": lambda: raw_callback(x),
        "ours, out=x": lambda: ours(x, x),
        "raw callback, on clone": lambda: raw_callback(x.clone()),
        "ours, functional": lambda: ours(x, None),
    }


async def delays_during(operation: Operation, count: int) -> list[float]:
    """Return how late each heartbeat is, in seconds, while ``operation`` runs ``count`` times."""
    late: list[float] = []

    async def heartbeat() -> None:
        while True:
            start = perf_counter()
            await anyio.sleep(HEARTBEAT_SECONDS)
            late.append(perf_counter() - start - HEARTBEAT_SECONDS)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat)
        for _ in range(count):
            await operation()
        await anyio.sleep(2 * HEARTBEAT_SECONDS)  # to record the delay that the last operation caused
        tasks.cancel_scope.cancel()
    return late


async def heartbeats(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the delays of all rounds, by load and then by way."""
    found: dict[str, dict[str, list[float]]] = {}
    for load, (numel, count) in LOADS.items():
        for _ in range(rounds):
            for name, operation in operations_on(torch.zeros(numel)).items():
                dist.barrier()
                found.setdefault(load, {}).setdefault(name, []).extend(await delays_during(operation, count))
    return found


async def idle() -> float:
    """Return the processor time of rank 0, as a fraction of the time it waits for the other rank."""
    await ac.barrier()
    if ac.get_rank() > 0:
        sleep(IDLE_SECONDS)  # noqa: ASYNC251  # the whole rank is meant to be late
    start, used = perf_counter(), process_time()
    await ac.all_reduce(torch.zeros(1 << 10))
    return (process_time() - used) / (perf_counter() - start)


async def measure(rounds: int) -> dict[str, Any]:
    late = await heartbeats(rounds)
    p99 = {
        load: {name: statistics.quantiles(delays, n=100)[98] * 1e3 for name, delays in by_name.items()}
        for load, by_name in late.items()
    }
    return {"p99 in ms": p99, "idle": await idle()}


def report(loop: str, found: dict[str, Any]) -> None:
    print(
        f"\n{loop}: an idle waiter takes {found['idle']:.2%} of a core; heartbeat delay, 99th percentile (ms)"
    )
    for load, by_name in found["p99 in ms"].items():
        for name, late in by_name.items():
            print(f"{load:>18} {name:>24} {late:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="rounds per case (default 6)")
    parser.add_argument("--data", type=Path, help="write the figures there, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ac.initialize("gloo")
    found = {}
    for loop, (backend, options) in LOOPS.items():
        found[loop] = anyio.run(measure, given.rounds, backend=backend, backend_options=options)
        if ac.get_rank() == 0:
            report(loop, found[loop])
    if given.data is not None and ac.get_rank() == 0:
        given.data.write_text(json.dumps(found, indent=1))
    ac.finalize()


if __name__ == "__main__":
    main()

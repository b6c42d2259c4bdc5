"""``await ac.op(x)`` against the raw call, per size; and how the event loop fares meanwhile.

Run it on two ranks: ``asynccoll run -n 2 benchmarks/latency.py`` (``make bench``). For each size it prints
the in-place operation (``await ac.all_reduce(x, out=x)`` against
``torch.distributed.all_reduce(x, async_op=True).wait()``) and the functional one (``await
ac.all_reduce(x)`` against the raw call on ``x.clone()``); then the delay of a 1 ms heartbeat task while 64
MiB are reduced, against the raw call with a plain future callback.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sidebyside import Series, side_by_side

import asynccoll as ac

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
HEARTBEAT_SECONDS = 0.001


def peers_for(x: torch.Tensor) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every way to all_reduce ``x``, each as an async function of no arguments."""
    clone = x.clone()

    async def raw_in_place() -> None:
        dist.all_reduce(x, async_op=True).wait()

    async def ours_in_place() -> None:
        await ac.all_reduce(x, out=x)

    async def raw_clone() -> None:
        fresh = clone.clone()
        dist.all_reduce(fresh, async_op=True).wait()

    async def ours_functional() -> None:
        await ac.all_reduce(clone)

    async def torch_functional() -> None:
        functional.wait_tensor(functional.all_reduce(clone, "sum", dist.group.WORLD))

    return {
        "raw in place": raw_in_place,
        "ours out=x": ours_in_place,
        "raw on clone": raw_clone,
        "ours": ours_functional,
        "torch functional": torch_functional,
    }


async def latency(rounds: int) -> None:
    report = ac.get_rank() == 0
    columns = ("raw in place", "ours out=x", "ratio", "raw clone", "ours", "ratio", "vs functional")
    if report:
        print(f"{'size':>7} " + " ".join(f"{name:>14}" for name in columns) + "   (us: median, low)")
    for label, size_bytes in SIZES.items():
        operations = 50 if size_bytes <= 64 << 10 else 10 if size_bytes <= 1 << 20 else 3
        x = torch.zeros(size_bytes // 4)
        found = await side_by_side(peers_for(x), rounds=rounds, operations=operations)
        if report:
            print(f"{label:>7} " + " ".join(f"{cell:>14}" for cell in _row(found)), flush=True)


def _row(found: dict[str, Series]) -> list[str]:
    raw, ours = found["raw in place"], found["ours out=x"]
    clone, functional_ours = found["raw on clone"], found["ours"]
    return [
        _us(raw),
        _us(ours),
        f"{ours.ratio_to(raw):.3f}",
        _us(clone),
        _us(functional_ours),
        f"{functional_ours.ratio_to(clone):.3f}",
        f"{functional_ours.ratio_to(found['torch functional']):.3f}",
    ]


def _us(series: Series) -> str:
    return f"{series.median * 1e6:.0f}, {series.low * 1e6:.0f}"


# The event loop meanwhile


async def callback_await(x: torch.Tensor) -> None:
    """The raw call awaited in the plain way: a future callback that wakes the loop."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    work = dist.all_reduce(x, async_op=True)
    work.get_future().add_done_callback(lambda _: loop.call_soon_threadsafe(done.set_result, None))
    await done


async def delays_during(operation: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """How late a 1 ms heartbeat comes (in seconds) while ``operation`` runs ``count`` times."""
    late: list[float] = []
    running = True

    async def heartbeat() -> None:
        while running:
            start = perf_counter()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            late.append(perf_counter() - start - HEARTBEAT_SECONDS)

    beating = asyncio.create_task(heartbeat())
    for _ in range(count):
        await operation()
    running = False
    await beating
    return late


async def responsiveness(rounds: int) -> None:
    x = torch.zeros(16 << 20)  # 64 MiB
    source = torch.zeros(16 << 20)

    async def raw_fresh() -> None:
        await callback_await(source.clone())

    operations: dict[str, Callable[[], Awaitable[Any]]] = {
        "raw callback, in place": lambda: callback_await(x),
        "ours, out=x": lambda: _ours(x, x),
        "raw callback, on clone": raw_fresh,
        "ours, functional": lambda: _ours(source, None),
        "nothing at all": lambda: asyncio.sleep(0.1),
    }
    found: dict[str, list[float]] = {name: [] for name in operations}
    worst: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds):
        for name, operation in operations.items():
            dist.barrier()
            late = await delays_during(operation, 3)
            found[name] += late
            worst[name].append(max(late))
    if ac.get_rank() == 0:
        print("\nheartbeat delay while 64 MiB are reduced (ms): 99th percentile, median of worst")
        for name, late in found.items():
            p99 = statistics.quantiles(late, n=100)[98]
            print(f"{name:>24} {p99 * 1e3:8.2f} {statistics.median(worst[name]) * 1e3:8.2f}")


async def _ours(x: torch.Tensor, out: torch.Tensor | None) -> None:
    await ac.all_reduce(x, out=out)


async def main(rounds: int) -> None:
    await latency(rounds)
    await responsiveness(max(4, rounds // 5))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds per size (default 60)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ac.initialize("gloo")
    asyncio.run(main(arguments.rounds))
    ac.finalize()

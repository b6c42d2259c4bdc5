"""``ac.all_reduce`` on xla-tpu compared with a bare loop of ``xm.all_reduce``, launch and wait.

Run it with plain python where torch_xla is installed: ``python benchmarks/xla_latency.py``. On the CPU the
ranks are threads of this process. The bare loop does only what a sound collective requires there (see
docs/backends/xla.md). Both are functional, on device tensors, alternate, and are timed on every replica. Then
eight collectives in flight are compared with eight one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import statistics
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from asynccoll.backends.xla.threads import environment, run_replicas

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
IN_FLIGHT = 8


class Bare:
    """The loop by hand. Under one lock, the first replica compiles, and the others reuse the result."""

    lock = threading.Lock()

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        self.native: Any = torch_xla._XLAC
        self.xm = xm
        self.device = str(torch_xla.device())
        (self.real,) = self.native._xla_real_devices([self.device])

    def wait(self) -> None:
        self.native._xla_wait_device_ops(devices=[self.real])

    def __call__(self, x: Any) -> Any:
        result = self.xm.all_reduce("sum", x)
        self.native._set_all_reduce_token(self.device, None)
        self.wait()
        with self.lock:
            self.native._xla_sync_multi([result], [], wait=False, sync_xla_data=True)
        self.wait()
        return result


async def timed(step: Callable[[], object], together: threading.Barrier) -> float:
    """Return the seconds of ``step``; if it returns an awaitable, that is awaited in the running loop."""
    together.wait()
    start = perf_counter()
    done = step()
    if inspect.isawaitable(done):
        await done
    return perf_counter() - start


async def compare(
    ways: dict[str, Callable[[], object]], rounds: int, together: threading.Barrier
) -> dict[str, float]:
    """Return the median of each way in milliseconds; the ways alternate."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 5):
        for name, step in ways.items():
            seconds = await timed(step, together)
            if turn >= 5:
                took[name].append(1e3 * seconds)
    return {name: statistics.median(all_of_them) for name, all_of_them in took.items()}


async def measure(rank: int, size: int, rounds: int, together: threading.Barrier) -> None:
    import torch

    import asynccoll as ac

    ac.initialize("xla-tpu")
    bare = Bare()
    if rank == 0:
        print(f"{size} replicas, median of {rounds}\n")
        print(f"{'':>8} {'bare':>9} {'wait()':>9} {'await':>9}   wait/bare   wait-bare")
    for name, size_bytes in SIZES.items():
        x = torch.ones(size_bytes // 4, device=ac.device())
        bare.native._xla_sync_multi([x], [], wait=True, sync_xla_data=True)
        few = max(10, rounds // 10) if size_bytes > 1 << 20 else rounds
        took = await compare(
            {
                "bare": lambda x=x: bare(x),
                "wait": lambda x=x: ac.all_reduce(x).wait(),
                "await": lambda x=x: ac.all_reduce(x),
            },
            few,
            together,
        )
        if rank == 0:
            b, w, a = took["bare"], took["wait"], took["await"]
            print(f"{name:>8} {b:6.3f} ms {w:6.3f} ms {a:6.3f} ms   x{w / b:8.2f}   {w - b:+6.3f} ms")
    await in_flight(rank, rounds // 4, together)
    ac.finalize()


async def in_flight(rank: int, rounds: int, together: threading.Barrier) -> None:
    import torch

    import asynccoll as ac

    if rank == 0:
        print(f"\n{IN_FLIGHT} collectives      in turn   in flight   ratio")
    for name in ("4 KiB", "1 MiB"):
        xs = [torch.full((SIZES[name] // 4,), float(k), device=ac.device()) for k in range(IN_FLIGHT)]
        for x in xs:
            ac.all_reduce(x).wait()

        def one_by_one(xs: list[torch.Tensor] = xs) -> None:
            for x in xs:
                ac.all_reduce(x).wait()

        def together_in_flight(xs: list[torch.Tensor] = xs) -> None:
            for work in [ac.all_reduce(x) for x in xs]:
                work.wait()

        took = await compare({"in turn": one_by_one, "in flight": together_in_flight}, rounds, together)
        if rank == 0:
            a, b = took["in turn"], took["in flight"]
            print(f"{name:>14} {a:9.3f} ms {b:8.3f} ms   x{b / a:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    environment(given.replicas, os.environ)
    together = threading.Barrier(given.replicas)
    run_replicas(lambda rank: asyncio.run(measure(rank, given.replicas, given.rounds, together)))


if __name__ == "__main__":
    main()

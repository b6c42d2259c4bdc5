"""Round trips of messages between two ranks: ours (awaited on asyncio, and blocking) compared with raw gloo.

``asynccoll run -n 2 benchmarks/messages.py [--rounds 7]``; ``ASYNCCOLL_MEMORY=0`` makes ours use gloo, too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import asynccoll as ac

SIZES = {"4 B": 4, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
#: How long one way runs at one size in one round.
SECONDS = 0.2


def raw(x: torch.Tensor, out: torch.Tensor, times: int) -> None:
    peer = 1 - ac.get_rank()
    for _ in range(times):
        if peer:
            dist.send(x, peer)
            dist.recv(out, peer)
        else:
            dist.recv(out, peer)
            dist.send(x, peer)


def waited(x: torch.Tensor, out: torch.Tensor, times: int) -> None:
    peer = 1 - ac.get_rank()
    for _ in range(times):
        if peer:
            ac.send(x, dst=peer).wait()
            ac.recv(out, src=peer, out=out).wait()
        else:
            ac.recv(out, src=peer, out=out).wait()
            ac.send(x, dst=peer).wait()


async def awaited(x: torch.Tensor, out: torch.Tensor, times: int) -> None:
    peer = 1 - ac.get_rank()
    for _ in range(times):
        if peer:
            await ac.send(x, dst=peer)
            await ac.recv(out, src=peer, out=out)
        else:
            await ac.recv(out, src=peer, out=out)
            await ac.send(x, dst=peer)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], None]] = {
    "gloo": raw,
    "wait": waited,
    "await": lambda x, out, times: asyncio.run(awaited(x, out, times)),
}


def microseconds(way: str, size_bytes: int, times: int) -> float:
    x = torch.ones(size_bytes // 4)
    out = torch.empty_like(x)
    ac.barrier().wait()
    begun = time.perf_counter()
    WAYS[way](x, out, times)
    return (time.perf_counter() - begun) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ac.initialize("gloo")
    ac.print0("there and back, us: gloo, waited for, awaited; medians of the ratios to gloo within a round")
    for name, size_bytes in SIZES.items():
        times = dict.fromkeys(WAYS, 0)
        for way in WAYS:
            microseconds(way, size_bytes, 3)
            seconds = ac.all_reduce(microseconds(way, size_bytes, 5), op="max").wait() / 1e6
            times[way] = min(2000, max(3, int(SECONDS / seconds)))
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                found[way].append(microseconds(way, size_bytes, times[way]))
        ratios = [
            statistics.median(ours / gloo for ours, gloo in zip(found[way], found["gloo"], strict=True))
            for way in ("wait", "await")
        ]
        shown = ", ".join(f"{statistics.median(one):.0f}" for one in found.values())
        ac.print0(f"{name:>8}: {shown}; " + ", ".join(f"x{ratio:.2f}" for ratio in ratios))
    ac.finalize()


if __name__ == "__main__":
    main()

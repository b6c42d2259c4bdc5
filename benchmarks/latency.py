"""``await ac.all_reduce(x)`` against the raw call, per size.

Run it on two ranks: ``asynccoll run -n 2 benchmarks/latency.py`` (``make bench``). For each size it prints
the in-place operation (``await ac.all_reduce(x, out=x)`` against
``torch.distributed.all_reduce(x, async_op=True).wait()``) and the functional one (``await
ac.all_reduce(x)`` against the raw call on ``x.clone()``). The other collectives are in ``collectives.py``,
how the event loop fares meanwhile in ``responsiveness.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sidebyside import Series, side_by_side

import asynccoll as ac

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}


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


async def latency(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Print the table; way -> size in bytes -> median, low, and the median of the ratios to the raw call."""
    figures: dict[str, dict[str, list[float]]] = {}
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
        for name, one in found.items():
            ratio = one.ratio_to(found["raw in place"])
            figures.setdefault(name, {})[str(size_bytes)] = [one.median, one.low, ratio]
    return figures


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds per size (default 60)")
    parser.add_argument("--data", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ac.initialize("gloo")
    figures = asyncio.run(latency(arguments.rounds))
    if arguments.data is not None and ac.get_rank() == 0:
        arguments.data.write_text(json.dumps(figures, indent=1))
    ac.finalize()

"""Strings, numbers, dicts with tensors: ours compared with the object collectives of torch and ignite.

    python -m asynccoll run -n 2 benchmarks/objects.py

``await ac.all_gather_object(value)`` against ``torch.distributed.all_gather_object`` and
``ignite.distributed.all_gather``; ``await ac.broadcast_object(value)`` against
``torch.distributed.broadcast_object_list`` and ``ignite.distributed.broadcast``, which takes numbers and
strings. Every round runs every library once, in an order that changes. It prints medians and tenth
percentiles in microseconds, and the median ratios; ``--data`` writes them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist

import asynccoll as ac
from asynccoll.bench.sidebyside import Peer, Series, side_by_side

METRICS = {"loss": 0.25, "accuracy": {"top1": 0.5, "top5": 0.75}, "step": 12345, "name": "validation"}
VALUES: dict[str, Any] = {
    "int": 12345,
    "float": 0.5,
    "str": "rank zero",
    "90 kB str": "x" * 90_000,
    "metrics": METRICS,
    "with tensors": {"state": [torch.arange(16), {"mean": torch.zeros(8)}], **METRICS},
    "1 MiB of tensors": {"weights": [torch.zeros(64 << 10) for _ in range(4)]},
    "2,000 numbers": {f"key {i}": i / 3 for i in range(2000)},
}


def gathering(value: Any) -> dict[str, Peer]:
    async def torchs() -> None:
        into = [None] * dist.get_world_size()
        dist.all_gather_object(into, value)

    async def ignites() -> None:
        idist.all_gather(value)

    async def ours() -> None:
        await ac.all_gather_object(value)

    return {"ours": ours, "torch": torchs, "ignite": ignites}


def broadcasting(value: Any) -> dict[str, Peer]:
    async def torchs() -> None:
        dist.broadcast_object_list([value], src=0)

    async def ignites() -> None:
        idist.broadcast(value)

    async def ours() -> None:
        await ac.broadcast_object(value)

    known = isinstance(value, (int, float)) or (isinstance(value, str) and len(value) < 1000)
    return {"ours": ours, "torch": torchs, **({"ignite": ignites} if known else {})}


async def main(rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if ac.get_rank() == 0:
        print(
            f"{'':>28} {'ours':>14} {'torch':>14} {'ignite':>14}   torch/ours ignite/ours   (us: median, low)"
        )
    for operation, peers_of in (("all_gather", gathering), ("broadcast", broadcasting)):
        for name, value in VALUES.items():
            operations = 5 if name in {"1 MiB of tensors", "2,000 numbers"} else 15
            found = await side_by_side(peers_of(value), rounds=rounds, operations=operations)
            row = figures[f"{operation} {name}"] = {
                peer: {"median": one.median, "low": one.low, "times ours": one.ratio_to(found["ours"])}
                for peer, one in found.items()
            }
            if ac.get_rank() == 0:
                cells = [_us(found[peer]) if peer in found else "-" for peer in ("ours", "torch", "ignite")]
                ratios = [
                    f"{row[peer]['times ours']:.1f}" if peer in row else "-" for peer in ("torch", "ignite")
                ]
                line = (
                    " ".join(f"{cell:>14}" for cell in cells) + "   " + " ".join(f"{r:>10}" for r in ratios)
                )
                print(f"{operation + ' ' + name:>28} {line}", flush=True)
    return figures


def _us(series: Series) -> str:
    return f"{series.median * 1e6:.0f}, {series.low * 1e6:.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds per case (default 12)")
    parser.add_argument("--data", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ac.initialize("gloo")
    idist.sync()
    figures = asyncio.run(main(arguments.rounds))
    if arguments.data is not None and ac.get_rank() == 0:
        arguments.data.write_text(json.dumps(figures, indent=1))
    ac.finalize()

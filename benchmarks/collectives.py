"""The other collectives beside their raw calls: all_gather, all_to_all, broadcast and reduce_scatter.

Run it on two ranks: ``make bench BENCH=collectives``. For each size (of what a rank holds of the whole) it
prints the raw call with ``async_op=True`` and ``wait()`` into a buffer that is there, ours with ``out=``, and
ours with a fresh result beside the raw call into fresh memory. Times are medians and 10th percentiles in
microseconds; ratios are medians over rounds. ``all_reduce`` is in ``latency.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sidebyside import Peer, Series, side_by_side

import asynccoll as ac

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}


def all_gather(x: torch.Tensor, out: torch.Tensor | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def raw() -> Any:
        into = x.new_empty(x.numel() * ac.get_world_size()) if out is None else out
        return dist.all_gather_single(into, x, async_op=True)

    return raw, lambda: ac.all_gather(x, out=out)


def all_to_all(x: torch.Tensor, out: torch.Tensor | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def raw() -> Any:
        return dist.all_to_all_single(torch.empty_like(x) if out is None else out, x, async_op=True)

    return raw, lambda: ac.all_to_all(x, out=out)


def broadcast(x: torch.Tensor, out: torch.Tensor | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def raw() -> Any:
        return dist.broadcast(x.clone() if out is None else x, 0, async_op=True)

    return raw, lambda: ac.broadcast(x, out=None if out is None else x)


def reduce_scatter(x: torch.Tensor, out: torch.Tensor | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def raw() -> Any:
        into = x.new_empty(x.numel() // ac.get_world_size()) if out is None else out
        return dist.reduce_scatter_single(into, x, async_op=True)

    return raw, lambda: ac.reduce_scatter(x, out=out)


OPS = {
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce_scatter": reduce_scatter,
}


WIDTHS = (14, 14, 6) * 2


def peers_for(name: str, numel: int) -> dict[str, Peer]:
    size = ac.get_world_size()
    numel = max(numel, 1) if name in {"all_gather", "broadcast"} else max(numel, size)
    x = torch.zeros(numel)
    out = torch.zeros({"all_gather": numel * size, "reduce_scatter": numel // size}.get(name, numel))
    peers: dict[str, Peer] = {}
    for memory, into in (("", out), (" fresh", None)):
        raw, ours = OPS[name](x, into)

        async def run_raw(raw: Callable[[], Any] = raw) -> None:
            raw().wait()

        async def run_ours(ours: Callable[[], Any] = ours) -> None:
            await ours()

        peers |= {f"raw{memory}": run_raw, f"ours{memory}": run_ours}
    return peers


async def measure(rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in OPS:
        if ac.get_rank() == 0:
            heads = ("raw", "out=", "ratio", "raw fresh", "ours", "ratio")
            print(f"\n{name:>15} " + " ".join(f"{h:>{w}}" for h, w in zip(heads, WIDTHS, strict=True)))
        for label, size_bytes in SIZES.items():
            operations = 30 if size_bytes <= 64 << 10 else 6 if size_bytes <= 1 << 20 else 2
            found = await side_by_side(peers_for(name, size_bytes // 4), rounds=rounds, operations=operations)
            into, fresh = (found[f"ours{m}"].ratio_to(found[f"raw{m}"]) for m in ("", " fresh"))
            figures.setdefault(name, {})[size_bytes] = {
                "microseconds": {peer: one.median * 1e6 for peer, one in found.items()},
                "ratio": into,
                "ratio fresh": fresh,
            }
            if ac.get_rank() == 0:
                cells = [us(found["raw"]), us(found["ours"]), f"{into:.3f}"]
                cells += [us(found["raw fresh"]), us(found["ours fresh"]), f"{fresh:.3f}"]
                row = (f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
                print(f"{label:>15} " + " ".join(row), flush=True)
    return figures


def us(series: Series) -> str:
    return f"{series.median * 1e6:.0f}, {series.low * 1e6:.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="rounds per size (default 25)")
    parser.add_argument("--data", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ac.initialize("gloo")
    measured = asyncio.run(measure(arguments.rounds))
    if arguments.data is not None and ac.get_rank() == 0:
        arguments.data.write_text(json.dumps(measured, indent=1))
    ac.finalize()

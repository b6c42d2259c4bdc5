"""Many tensors in one operation, prepared operations, and many in flight, compared with the raw calls.

    python -m asynccoll run -n 2 benchmarks/fusion.py                 everything
    python -m asynccoll run -n 2 benchmarks/fusion.py --only flight   or trees, or prepared

- **trees**: 1,000 tensors of 4 KiB, and the parameters of ResNet-50 and GPT-2 small: ``await
  ac.all_reduce(tree)`` (also in place, and prepared) against a loop of raw async calls, one hand-flattened
  all_reduce (``torch.cat`` and ``split``, or torch's own helpers in C), and ``all_reduce_coalesced``.
- **prepared**: ``await op.start()`` against the raw call in place and on a clone.
- **flight**: 64 operations in flight, awaited in order and by ``as_completed``, against a raw loop.

Every round runs every way once, in an order that changes. It prints medians and tenth percentiles in
milliseconds, and the median over rounds of the ratio to the first way; ``--data`` writes them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Made, gpt2, resnet50
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import asynccoll as ac
from asynccoll.bench.sidebyside import Peer, Series, side_by_side


def shapes(model: Callable[[], Made]) -> list[torch.Size]:
    """Return the shapes of a model's parameters, without their memory."""
    with torch.device("meta"):
        return [parameter.shape for parameter in model()[0].parameters()]


MODELS = {
    "1,000 x 4 KiB": ([torch.Size([1024])] * 1000, 20),
    "ResNet-50": (shapes(resnet50), 5),
    "GPT-2 small": (shapes(gpt2), 3),
}
SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
IN_FLIGHT = 64


def tree_peers(xs: list[torch.Tensor]) -> dict[str, Peer]:
    """Return every way to reduce ``xs`` except the loop of raw calls, which ``trees`` runs less often."""
    prepared = ac.prepare("all_reduce", xs, out=xs)

    async def by_hand() -> object:
        flat = torch.cat([x.reshape(-1) for x in xs])
        dist.all_reduce(flat, async_op=True).wait()
        parts = flat.split([x.numel() for x in xs])
        return [part.view(x.shape) for part, x in zip(parts, xs, strict=True)]

    async def by_hand_in_c() -> object:
        flat = _flatten_dense_tensors(xs)
        dist.all_reduce(flat, async_op=True).wait()
        return _unflatten_dense_tensors(flat, xs)

    async def coalesced() -> None:
        dist.all_reduce_coalesced(xs, async_op=True).wait()

    async def ours() -> object:
        return await ac.all_reduce(xs)

    async def ours_in_place() -> None:
        await ac.all_reduce(xs, out=xs)

    async def ours_prepared() -> None:
        await prepared.start()

    async def ours_coalescing() -> object:
        with ac.coalescing():
            works = [ac.all_reduce(x) for x in xs]
        return await ac.wait_all(works)

    return {
        "flattened by hand": by_hand,
        "flattened in C": by_hand_in_c,
        "all_reduce_coalesced": coalesced,
        "ours": ours,
        "ours out=tree": ours_in_place,
        "ours prepared": ours_prepared,
        "ours coalescing()": ours_coalescing,
    }


async def trees(rounds: int) -> dict[str, Any]:
    found = {}
    for name, (shapes, share) in MODELS.items():
        xs = [torch.zeros(shape) for shape in shapes]
        peers = tree_peers(xs)
        series = await side_by_side(peers, rounds=max(3, rounds * share // 20), operations=1)

        async def loop(xs: list[torch.Tensor] = xs) -> None:
            for work in [dist.all_reduce(x, async_op=True) for x in xs]:
                work.wait()

        pair = {"ours": peers["ours"], "loop of raw calls": loop}
        slow = await side_by_side(pair, rounds=max(3, rounds * share // 40), operations=1)
        found[name] = show(name, series)
        found[name] |= {"loop over ours": slow["loop of raw calls"].ratio_to(slow["ours"])}
        if ac.get_rank() == 0:
            print(
                f"{'a loop of raw calls takes':>24} {found[name]['loop over ours']:.1f} times as long as ours"
            )
            print(f"{'':>4}{ac.explain('all_reduce', xs).why[0]}", flush=True)
        del xs, peers, pair
    return found


async def prepared(rounds: int) -> dict[str, Any]:
    found = {}
    for name, size_bytes in SIZES.items():
        x = torch.zeros(size_bytes // 4)
        in_place, fresh = ac.prepare("all_reduce", x, out=x), ac.prepare("all_reduce", x)

        async def raw(x: torch.Tensor = x) -> None:
            dist.all_reduce(x, async_op=True).wait()

        async def raw_clone(x: torch.Tensor = x) -> None:
            dist.all_reduce(x.clone(), async_op=True).wait()

        async def ours(x: torch.Tensor = x) -> None:
            await ac.all_reduce(x, out=x)

        async def started(op: ac.Prepared[Any] = in_place) -> None:
            await op.start()

        async def started_fresh(op: ac.Prepared[Any] = fresh) -> None:
            await op.start()

        peers: dict[str, Peer] = {
            "raw in place": raw,
            "raw on a clone": raw_clone,
            "ours out=x": ours,
            "prepared, out=x": started,
            "prepared": started_fresh,
        }
        operations = 30 if size_bytes <= 64 << 10 else 8
        found[name] = show(name, await side_by_side(peers, rounds=rounds, operations=operations))
    return found


async def flight(rounds: int) -> dict[str, Any]:
    found = {}
    for name in ("4 B", "4 KiB", "64 KiB"):
        xs = [torch.zeros(SIZES[name] // 4) for _ in range(IN_FLIGHT)]

        async def raw(xs: list[torch.Tensor] = xs) -> None:
            for work in [dist.all_reduce(x, async_op=True) for x in xs]:
                work.wait()

        async def in_order(xs: list[torch.Tensor] = xs) -> None:
            for work in [ac.all_reduce(x, out=x) for x in xs]:
                await work

        async def as_completed(xs: list[torch.Tensor] = xs) -> None:
            async for _ in ac.as_completed([ac.all_reduce(x, out=x) for x in xs]):
                pass

        peers: dict[str, Peer] = {"raw loop": raw, "ours in order": in_order, "as_completed": as_completed}
        found[name] = show(f"{IN_FLIGHT} x {name}", await side_by_side(peers, rounds=rounds, operations=1))
    return found


def show(title: str, found: dict[str, Series]) -> dict[str, Any]:
    """Print a table on rank 0, and return its figures."""
    first = next(iter(found.values()))
    if ac.get_rank() == 0:
        print(f"\n{title:>24} {'median':>10} {'low':>10}  over {first.name}   (ms)")
        for name, series in found.items():
            figures = f"{series.median * 1e3:10.3f} {series.low * 1e3:10.3f}"
            print(f"{name:>24} {figures} {series.ratio_to(first):7.3f}", flush=True)
    return {
        name: {"median": one.median, "low": one.low, "ratio": one.ratio_to(first)}
        for name, one in found.items()
    }


PARTS = {"trees": trees, "prepared": prepared, "flight": flight}


async def main(only: str | None, rounds: int) -> dict[str, Any]:
    return {name: await part(rounds) for name, part in PARTS.items() if only in {None, name}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds per table (default 20)")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--data", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*will be deprecated.*", category=FutureWarning)
    torch.set_num_threads(1)
    ac.initialize("gloo")
    figures = asyncio.run(main(arguments.only, arguments.rounds))
    if arguments.data is not None and ac.get_rank() == 0:
        arguments.data.write_text(json.dumps(figures, indent=1))
    ac.finalize()

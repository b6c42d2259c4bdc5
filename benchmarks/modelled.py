"""A step over a slow link: measured on two ranks, and predicted by a simulated world.

    python benchmarks/modelled.py [--rate 400mbit]       as root: between two network namespaces

Both run the same function: a forward pass, then a backward pass in pieces, each followed by the all_reduce of
a bucket of gradients; compute is a sleep. The link of the simulated world is fitted to all_reduces of a few
sizes that the two ranks measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.testing import Link, simulate

HERE = Path(__file__).resolve()
ROUNDS = 15
SIZES = (4 << 10, 256 << 10, 2 << 20)
#: Each step: seconds of forward, pieces of backward, seconds of each piece, and bytes of each bucket.
STEPS = {
    "hidden": (0.02, 6, 0.03, 256 << 10),
    "half hidden": (0.02, 6, 0.01, 1 << 20),
    "hardly hidden": (0.01, 4, 0.002, 2 << 20),
}


async def step(forward: float, pieces: int, seconds: float, size_bytes: int) -> float:
    """Run one step. Returns its seconds."""
    begun = host.monotonic()
    await anyio.sleep(forward)
    works = []
    for _ in range(pieces):
        await anyio.sleep(seconds)
        works.append(ac.all_reduce(torch.zeros(size_bytes // 4)))
    for work in works:
        await work
    return host.monotonic() - begun


async def measured(rank: int) -> dict[str, Any]:
    """Return the median seconds of the all_reduces and of the steps."""
    reduced: dict[int, list[float]] = {size: [] for size in SIZES}
    steps: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(ROUNDS):
        for size in SIZES:
            x = torch.zeros(size // 4)
            await ac.barrier()
            begun = host.monotonic()
            await ac.all_reduce(x)
            reduced[size].append(host.monotonic() - begun)
        for name, told in STEPS.items():
            await ac.barrier()
            steps[name].append(await step(*told))
    return {
        "all_reduce": [(size, statistics.median(times)) for size, times in reduced.items()],
        "steps": {name: statistics.median(times) for name, times in steps.items()},
    }


async def modelled(rank: int) -> dict[str, float]:
    """Return the seconds of each step, with all lanes already open."""
    await ac.barrier()
    return {name: await step(*told) for name, told in STEPS.items()}


def report(found: dict[str, Any]) -> None:
    link = Link.fit([(size, seconds) for size, seconds in found["all_reduce"]])
    said = simulate(modelled, world_size=2, link=link)
    said.check()
    print(f"link: {link.seconds(0) * 1e6:.0f} us, {link.bandwidth / 1e6:.0f} MB/s")
    print(f"{'step (ms)':>14} {'measured':>9} {'modelled':>9} {'ratio':>6}")
    for name, seconds in found["steps"].items():
        model = said.results[0][name]
        print(f"{name:>14} {seconds * 1e3:>9.1f} {model * 1e3:>9.1f} {model / seconds:>6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="400mbit", help="of the link, as tc writes it")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is None:
        found = HERE.parent.parent / "build" / "modelled.json"
        found.parent.mkdir(exist_ok=True)
        netns = HERE.parent.parent / "tools" / "netns.py"
        place = "RANK=$HOST_RANK WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_PORT=29400"
        ranks = f"env {place} {shlex.join([sys.executable, str(HERE), '--rank', str(found)])}"
        subprocess.run([sys.executable, str(netns), "--rate", given.rate, ranks], check=True)
        report(json.loads(found.read_text()))
        return
    ac.initialize()
    result = anyio.run(measured, ac.get_rank())
    if ac.get_rank() == 0:
        given.rank.write_text(json.dumps(result))
    ac.finalize()


if __name__ == "__main__":
    main()

"""``asynccoll.sync`` compared with the real ``ignite.distributed``, call by call, in one run.

Run it on two or more ranks: ``asynccoll run -n 2 benchmarks/sync_latency.py``. Both use the same gloo world
in the same processes; each round runs both, in an order that changes. The ratio is our time over ignite's, as
the median over rounds; below 1, ours is faster.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Coroutine
from typing import Any

import ignite.distributed as theirs
import torch

import asynccoll as ac
import asynccoll.sync as ours
from asynccoll.bench.sidebyside import Series, side_by_side

SIZES = {"0-d": 0, "4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
NESTED = {"name": "run", "metrics": {"loss": [0.5, 0.25], "tags": ("a", "b")}, "step": 7, "none": None}
LONG = "x" * 90_000

Call = Callable[[Any], object]


def cases() -> dict[str, tuple[Call, int]]:
    """Return the calls to make on either module, and how many of each per round."""
    found: dict[str, tuple[Call, int]] = {}
    for name, size_bytes in SIZES.items():
        x = torch.zeros(size_bytes // 4) if size_bytes else torch.tensor(0.0)
        often = 40 if size_bytes <= 4 << 10 else 10 if size_bytes <= 1 << 20 else 2
        found[f"all_reduce {name}"] = (lambda idist, x=x: idist.all_reduce(x), often)
        found[f"all_gather {name}"] = (lambda idist, x=x: idist.all_gather(x), often)
        found[f"broadcast {name}"] = (lambda idist, x=x: idist.broadcast(x), often)
    values = {"int": 12345, "float": 0.5, "short str": "abc", "90 kB str": LONG, "nested": NESTED}
    for name, value in values.items():
        often = 20 if value is LONG else 40
        found[f"all_gather {name}"] = (lambda idist, x=value: idist.all_gather(x), often)
        if value is not NESTED:
            found[f"broadcast {name}"] = (lambda idist, x=value: idist.broadcast(x), often)
            found[f"safe broadcast {name}"] = (
                lambda idist, x=value: idist.broadcast(x, safe_mode=True),
                often,
            )
    found["all_reduce int"] = (lambda idist: idist.all_reduce(12345), 40)
    found["all_reduce float"] = (lambda idist: idist.all_reduce(0.5), 40)
    uneven = torch.zeros(ac.get_rank() + 1, 100)
    shapes = [[rank + 1, 100] for rank in range(ac.get_world_size())]
    found["all_gather with shapes"] = (
        lambda idist: idist.all_gather_tensors_with_shapes(uneven, shapes),
        40,
    )
    found["barrier"] = (lambda idist: idist.barrier(), 40)
    found["get_rank"] = (lambda idist: idist.get_rank(), 1000)
    return found


async def measure(only: str, rounds: int) -> None:
    report = ac.get_rank() == 0
    if report:
        print(f"{'call':>26} {'ignite':>14} {'ours':>14} {'ratio':>7}   (us: median, low)")
    for name, (call, operations) in cases().items():
        if only not in name:
            continue

        async def run_theirs(call: Call = call) -> None:
            call(theirs)

        async def run_ours(call: Call = call) -> None:
            call(ours)

        found = await side_by_side(
            {"ignite": run_theirs, "ours": run_ours}, rounds=rounds, operations=operations
        )
        if report:
            mine, real = found["ours"], found["ignite"]
            print(f"{name:>26} {_us(real):>14} {_us(mine):>14} {mine.ratio_to(real):7.2f}", flush=True)


def plainly(measuring: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends without an event loop, as programs written for ignite have none."""
    try:
        measuring.send(None)
    except StopIteration:
        return
    raise AssertionError("something was awaited that is not done")


def _us(series: Series) -> str:
    return f"{series.median * 1e6:.1f}, {series.low * 1e6:.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds per case (default 30)")
    parser.add_argument("--only", default="", help="run the cases whose name has this in it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ours.initialize("gloo")
    assert "LOCAL_RANK" in os.environ, "run me with `asynccoll run -n 2`"
    theirs.sync()
    plainly(measure(arguments.only, arguments.rounds))
    ours.finalize()

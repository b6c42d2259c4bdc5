"""What an all_reduce that sums up each node first saves: against gloo's ring, on two hosts of two ranks.

    python benchmarks/nodes.py                    as root, or on loopback alone
    python benchmarks/nodes.py --where gigabit    there alone

Places: ``loopback``, where the hosts are only said to be two; two network namespaces on this machine with a
link that carries 1 Gbit/s (``gigabit``), or that takes 1 ms for each packet (``millisecond``). Both ways are
taken in turn in the same processes, in an order that changes; the figures are medians of the rounds, and
the median of the ratios within a round. They are printed, and written as JSON (``--data``).
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import inplaces
import torch

import asynccoll as ac
from asynccoll.bench.sidebyside import Peer, side_by_side
from asynccoll.plan.spec import Policy
from asynccoll.runtime.process import current

EACH = 2
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
PLACES: dict[str, inplaces.Place] = {
    "loopback": partial(inplaces.on_loopback, ranks=inplaces.HOSTS * EACH, each=EACH),
    "gigabit": partial(inplaces.on_hosts, each=EACH, rate="1gbit"),
    "millisecond": partial(inplaces.on_hosts, each=EACH, delay=1e-3),
}


def way(x: torch.Tensor, name: str, policy: Policy) -> Peer:
    """An all_reduce on a lane of its own, which plans its first call for this size by ``policy``."""

    async def all_reduce() -> None:
        current().policy = policy
        await ac.all_reduce(x, out=x, lane=name)

    return all_reduce


async def measure(rounds: int) -> dict[int, Any]:
    found = {}
    for size_bytes in SIZES:
        x = torch.zeros(size_bytes // 4)
        ways = {name: way(x, name, Policy(by_node=name == "by node")) for name in ("ring", "by node")}
        series = await side_by_side(ways, rounds=rounds, operations=5 if size_bytes < 1 << 20 else 1)
        found[size_bytes] = {
            "milliseconds": {name: one.median * 1e3 for name, one in series.items()},
            "ratio": series["by node"].ratio_to(series["ring"]),
        }
    return found


def run_rank(rounds: int) -> None:
    torch.set_num_threads(1)
    ac.initialize("gloo")
    assert ac.get_nnodes() == inplaces.HOSTS
    found = asyncio.run(measure(rounds))
    if ac.get_rank() == 0:
        print(json.dumps(found))
    ac.finalize()


def report(place: str, found: dict[str, Any]) -> None:
    print(f"\n{place}: an all_reduce on {inplaces.HOSTS} hosts of {EACH} ranks (ms)")
    print(f"{'':>12} {'ring':>9} {'by node':>9} {'ratio':>7}")
    for size_bytes, one in found.items():
        took = one["milliseconds"]
        print(
            f"{int(size_bytes) >> 10:>8} KiB {took['ring']:9.2f} {took['by node']:9.2f} {one['ratio']:7.2f}"
        )


if __name__ == "__main__":
    inplaces.main(__file__, __doc__, PLACES, run_rank, report)

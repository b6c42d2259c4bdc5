"""What hierarchical collectives save on two hosts: shared memory within each, versus gloo among all ranks.

    python benchmarks/nodes.py                         as root: in all places; otherwise on loopback
    python benchmarks/nodes.py --where gigabit         only there
    ASYNCCOLL_MEMORY=0 python benchmarks/nodes.py      hierarchical, but with gloo within nodes

Places: ``loopback``, which pretends to be two hosts; and two network namespaces on this machine, whose link
is as fast as the machine (``link``), has 1 Gbit/s (``gigabit``) or delays each packet by 1 ms
(``millisecond``). Each host has two ranks, or three if the name ends in ``3``. Both ways alternate in the
same processes, in an order that changes; the figures are medians over the rounds, and the median of the
ratios within a round. They are printed, and ``--data`` writes them as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import inplaces
import torch

import asynccoll as ac
from asynccoll import Work
from asynccoll.bench.sidebyside import Peer, side_by_side
from asynccoll.plan.spec import Policy
from asynccoll.runtime.process import current

SIZES = (4, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
#: The sizes at which the other collectives are measured: bytes of the whole, over all ranks.
SOME_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
PLACES: dict[str, inplaces.Place] = {
    "loopback": partial(inplaces.on_loopback, ranks=inplaces.HOSTS * 2, each=2),
    "loopback3": partial(inplaces.on_loopback, ranks=inplaces.HOSTS * 3, each=3),
    "link": partial(inplaces.on_hosts, each=2),
    "link3": partial(inplaces.on_hosts, each=3),
    "gigabit": partial(inplaces.on_hosts, each=2, rate="1gbit"),
    "millisecond": partial(inplaces.on_hosts, each=2, delay=1e-3),
}


def calls(size_bytes: int) -> dict[str, Callable[[str], Work[Any]]]:
    """Return the collectives measured at this size, as functions of the lane."""
    x = torch.zeros(size_bytes // 4)
    found: dict[str, Callable[[str], Work[Any]]] = {
        "all_reduce": lambda lane: ac.all_reduce(x, out=x, lane=lane)
    }
    if size_bytes in SOME_SIZES:
        size = ac.get_world_size()
        part = torch.zeros(x.numel() // size)
        whole = torch.zeros(part.numel() * size)
        found["broadcast"] = lambda lane: ac.broadcast(x, out=x, lane=lane)
        found["all_gather"] = lambda lane: ac.all_gather(part, out=whole, lane=lane)
        found["reduce_scatter"] = lambda lane: ac.reduce_scatter(whole, out=part, lane=lane)
    return found


def way(call: Callable[[str], Work[Any]], name: str, policy: Policy) -> Peer:
    """Return ``call`` on its own lane, which plans its first call of this size by ``policy``."""

    async def once() -> None:
        current().policy = policy
        await call(name)

    return once


async def measure(rounds: int) -> dict[str, Any]:
    found = {}
    for size_bytes in SIZES:
        for name, call in calls(size_bytes).items():
            ways = {lane: way(call, lane, Policy(by_node=lane == "by host")) for lane in ("gloo", "by host")}
            few = size_bytes >= 1 << 20
            series = await side_by_side(
                ways, rounds=max(3, rounds // 3) if few else rounds, operations=1 if few else 10
            )
            found[f"{name} {size_bytes}"] = {
                "milliseconds": {lane: one.median * 1e3 for lane, one in series.items()},
                "ratio": series["by host"].ratio_to(series["gloo"]),
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
    print(f"\n{place} (ms)")
    print(f"{'':>28} {'gloo':>9} {'by host':>9} {'ratio':>7}", flush=True)
    for name, one in found.items():
        took = one["milliseconds"]
        print(f"{name:>28} {took['gloo']:9.3f} {took['by host']:9.3f} {one['ratio']:7.2f}", flush=True)


if __name__ == "__main__":
    inplaces.main(__file__, __doc__, PLACES, run_rank, report)

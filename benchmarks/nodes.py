"""What an all_reduce that sums up each node first saves: against gloo's ring, on two hosts of two ranks.

    python benchmarks/nodes.py                    as root, or on loopback alone
    python benchmarks/nodes.py --where gigabit    there alone

Places: ``loopback``, where the hosts are only said to be two; two network namespaces on this machine with a
link that carries 1 Gbit/s (``gigabit``), or that takes 1 ms for each packet (``millisecond``). Both ways are
taken in turn in the same processes, in an order that changes; the figures are medians of the rounds, and
the median of the ratios within a round. They are printed, and written as JSON (``--data``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from sidebyside import Peer, side_by_side

import asynccoll as ac
from asynccoll.runtime import current
from asynccoll.spec import Policy

sys.path.append(str(Path(__file__).parents[1] / "tools"))

PORT = "29479"
HOSTS, EACH = 2, 2
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
#: The link of each place: none, or what `netns.Hosts` takes.
PLACES: dict[str, dict[str, Any] | None] = {
    "loopback": None,
    "gigabit": {"rate": "1gbit"},
    "millisecond": {"delay": 1e-3},
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
    assert ac.get_nnodes() == HOSTS
    found = asyncio.run(measure(rounds))
    if ac.get_rank() == 0:
        print(json.dumps(found))
    ac.finalize()


def in_place(link: dict[str, Any] | None, line: list[str]) -> dict[str, Any]:
    if link is None:
        return result_of([start(rank, line, "127.0.0.1", "lo") for rank in range(HOSTS * EACH)])
    import netns

    with netns.Hosts(**link) as hosts:
        running = []
        for rank in range(HOSTS * EACH):
            on_host = hosts.command(rank // EACH, *line)
            running.append(start(rank, on_host, netns.ADDRESSES[0], netns.INTERFACE))
        return result_of(running)


def start(rank: int, line: list[str], address: str, interface: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[1])
    place = {
        "RANK": rank,
        "WORLD_SIZE": HOSTS * EACH,
        "LOCAL_RANK": rank % EACH,
        "LOCAL_WORLD_SIZE": EACH,
        "GROUP_RANK": rank // EACH,
        "GROUP_WORLD_SIZE": HOSTS,
        "MASTER_ADDR": address,
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    env = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True)


def result_of(running: list[subprocess.Popen[str]]) -> dict[str, Any]:
    try:
        said, *_ = [one.communicate()[0] for one in running]
    finally:
        for one in running:
            one.kill()
    if any(one.returncode for one in running):
        raise SystemExit("a rank failed; what it said is above")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def report(place: str, found: dict[str, Any]) -> None:
    print(f"\n{place}: an all_reduce on {HOSTS} hosts of {EACH} ranks (ms)")
    print(f"{'':>12} {'ring':>9} {'by node':>9} {'ratio':>7}")
    for size_bytes, one in found.items():
        took = one["milliseconds"]
        print(
            f"{int(size_bytes) >> 10:>8} KiB {took['ring']:9.2f} {took['by node']:9.2f} {one['ratio']:7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    all_of_them = list(PLACES) if os.geteuid() == 0 else ["loopback"]
    parser.add_argument("--where", nargs="+", choices=list(PLACES), default=all_of_them)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, help="where to write the figures as JSON")
    given = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(given.rounds)
        return
    line = [sys.executable, str(Path(__file__).resolve()), "--rounds", str(given.rounds)]
    found = {}
    for place in given.where:
        found[place] = in_place(PLACES[place], line)
        report(place, found[place])
    if given.data is not None:
        given.data.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

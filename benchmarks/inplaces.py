"""Run a benchmark's ranks in several places: on loopback, or on two hosts with a link between them.

In each place, one after the other, the benchmark is started once per rank. Its rank 0 prints the results as
JSON in its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tools"))

PORT = "29477"
HOSTS = 2

#: Runs a command line as all ranks of a place, and returns the results of its rank 0.
Place = Callable[[list[str]], dict[str, Any]]


def on_loopback(line: list[str], ranks: int, each: int) -> dict[str, Any]:
    """Run ``ranks`` ranks, pretending that each node has ``each`` of them."""
    return _result_of([_start(line, rank, ranks, each, "127.0.0.1", "lo") for rank in range(ranks)])


def on_hosts(line: list[str], each: int, **link: Any) -> dict[str, Any]:
    """Run ``each`` ranks on each of two hosts; ``link``: as in `netns.Hosts`."""
    import netns

    with netns.Hosts(**link) as hosts:
        for host in range(HOSTS):  # Horovod uses the host's name, which would resolve to loopback
            hosts.run(host, "hostname", netns.ADDRESSES[host])
        ranks, place = HOSTS * each, (netns.ADDRESSES[0], netns.INTERFACE)
        return _result_of(
            [_start(hosts.command(rank // each, *line), rank, ranks, each, *place) for rank in range(ranks)]
        )


def _start(
    line: list[str], rank: int, ranks: int, each: int, address: str, interface: str
) -> subprocess.Popen[str]:
    """Start one rank, with the environment variables that a launcher would set."""
    root = str(Path(__file__).parents[1])
    place = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % each,
        "LOCAL_WORLD_SIZE": each,
        "GROUP_RANK": rank // each,
        "GROUP_WORLD_SIZE": ranks // each,
        "MASTER_ADDR": address,
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    env = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True)


def _result_of(running: list[subprocess.Popen[str]]) -> dict[str, Any]:
    try:
        said, *_ = [one.communicate()[0] for one in running]
    finally:
        for one in running:
            one.kill()
    if any(one.returncode for one in running):
        raise SystemExit("a rank failed; what it said is above")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main(
    program: str,
    description: str | None,
    places: Mapping[str, Place],
    run_rank: Callable[[int], None],
    report: Callable[[str, dict[str, Any]], None],
) -> None:
    """Measure in the places given on the command line (by default all, as root), or run as a rank in one."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    possible = list(places) if os.geteuid() == 0 else ["loopback"]
    parser.add_argument("--where", nargs="+", choices=list(places), default=possible)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, help="where to write the figures as JSON")
    given = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(given.rounds)
        return
    line = [sys.executable, str(Path(program).resolve()), "--rounds", str(given.rounds)]
    found = {}
    for place in given.where:
        found[place] = places[place](line)
        report(place, found[place])
    if given.data is not None:
        given.data.write_text(json.dumps(found, indent=1))

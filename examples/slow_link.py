"""Time the steps of ``train_digits.py`` where communication is expensive: over a slow link.

    sudo python examples/slow_link.py

Two ranks run on separate hosts: network namespaces on this machine, joined by an Ethernet link of limited
bandwidth. Needs root on Linux, and the programs ip, tc, unshare and nsenter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import netns  # noqa: E402  # in the repository, in no package

RATE, CALLED = "300mbit", "300 Mbit/s"
INSTEAD = (
    "where communication costs more, hiding it gains more: `sudo make demo` times the steps over a link of\n"
    f"{CALLED}, too, and docs/overlap.md has figures for 1 Gbit/s"
)


def start(hosts: netns.Hosts, rank: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a rank on its host, with the environment variables that a launcher would set."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": 2,
        "MASTER_ADDR": netns.ADDRESSES[0],
        "MASTER_PORT": 29400,
        "GLOO_SOCKET_IFNAME": netns.INTERFACE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # suppresses the warning that these addresses have no names
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
    }
    env = {**os.environ, **{name: str(value) for name, value in place.items()}}
    program = str(Path(__file__).with_name("train_digits.py"))
    line = [sys.executable, program, "--link", CALLED, *arguments]
    return subprocess.Popen(hosts.command(rank, *line), env=env)


def main(arguments: list[str]) -> int:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        print(INSTEAD)
        return 0
    try:
        with netns.Hosts(rate=RATE) as hosts:
            return max([abs(one.wait()) for one in [start(hosts, rank, arguments) for rank in (0, 1)]])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:  # a container that may not create network namespaces, or lacks these programs
        print(f"{INSTEAD} (here: {error})")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

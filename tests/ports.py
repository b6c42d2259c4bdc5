"""Free ports, for tests that have to name one beforehand."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable


def free_ports(count: int, among: Iterable[int]) -> int:
    """Return the first of ``count`` consecutive free ports, starting at any of ``among``."""
    for first in among:
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError(f"no {count} free ports in a row")


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive free ports, not ephemeral and not of SLURM jobs."""
    # Not the global generator: hypothesis seeds it, so two runs would try the same ports.
    return free_ports(count, random.SystemRandom().sample(range(25_000, 32_000), 200))

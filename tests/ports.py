"""Ports that nobody listens on, for tests that have to name one beforehand."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable


def free_ports(count: int, among: Iterable[int]) -> int:
    """The first of ``count`` free ports in a row, tried from each of ``among`` on."""
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
    """The first of ``count`` free ports in a row, below the range that outgoing connections draw from."""
    # Not the module's own luck: hypothesis seeds that, and two runs would look for the same ports.
    return free_ports(count, random.SystemRandom().sample(range(15_000, 32_000), 200))

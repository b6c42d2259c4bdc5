"""What carries anything between simulated ranks: links with latency and bandwidth, beacons, the store."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from asynccoll.testing.primitives import sleep
from asynccoll.testing.scheduler import running

__all__ = ["Link", "Network", "SimulatedStore", "connect", "is_open", "listen", "own_address"]

K = TypeVar("K")
#: What asking the kernel of a near host takes.
_PROBE_SECONDS = 50e-6


@dataclass(frozen=True)
class Link:
    """How long a message takes: a latency drawn from a range (seconds), and its bytes over the bandwidth."""

    latency: tuple[float, float] = (20e-6, 2e-3)
    bandwidth: float = 1e9  # bytes a second

    def seconds(self, size_bytes: int, chance: random.Random) -> float:
        """For one message. Latencies are drawn by order of magnitude: most are short."""
        least, most = self.latency
        drawn = least * (most / least) ** chance.random() if least > 0 else most * chance.random()
        return drawn + size_bytes / self.bandwidth


class Network:
    """Which ranks are there, and their beacons."""

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.beacons: dict[int, Beacon] = {}  # by port

    def kill(self, rank: int) -> None:
        """The kernel closes what the process had."""
        self.dead.add(rank)
        for beacon in self.beacons.values():
            if beacon.rank == rank:
                beacon.lit = False


class Beacon:
    """A listening socket that nobody serves."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lit = True

    def close(self) -> None:
        self.lit = False


class _Line:
    """A connection to one."""

    def __init__(self, beacon: Beacon) -> None:
        self.beacon = beacon

    def close(self) -> None:
        """There is nothing to give back."""


class _Current:
    """The network of the simulation that runs."""

    network = Network()


current = _Current()


def own_address(meeting_host: str | None) -> str:
    """As ``host.network.own_address``."""
    return "127.0.0.1"


def listen(address: str) -> tuple[Beacon, int]:
    """As ``host.lines.listen``."""
    scheduler = running()
    assert scheduler is not None and scheduler.current is not None
    port = len(current.network.beacons) + 1
    beacon = current.network.beacons[port] = Beacon(scheduler.current.rank)
    return beacon, port


def is_open(line: _Line) -> bool:
    """As ``host.lines.is_open``."""
    return line.beacon.lit


def connect(peers: Mapping[K, tuple[str, int]], seconds: float) -> tuple[dict[K, _Line], list[K]]:
    """As ``host.lines.connect``: of near hosts none is silent."""
    sleep(min(seconds, _PROBE_SECONDS))
    beacons = {peer: current.network.beacons[port] for peer, (_, port) in peers.items()}
    return {peer: _Line(beacon) for peer, beacon in beacons.items() if beacon.lit}, []


class SimulatedStore(dist.Store):
    """The store at which ranks meet: each request takes its time, and is served at one moment of it."""

    def __init__(self, link: Link, held: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._link = link
        self._held: dict[str, bytes] = {} if held is None else held

    def clone(self) -> SimulatedStore:
        return SimulatedStore(self._link, self._held)

    def _ask(self, size_bytes: int = 0) -> None:
        scheduler = running()
        if scheduler is not None:
            sleep(self._link.seconds(size_bytes, scheduler.chance))

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(len(value))
        self._held[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._held[key]

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self._held for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._ask()
        total = int(self._held.get(key, b"0")) + amount
        self._held[key] = str(total).encode()
        return total

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._ask(sum(map(len, values)))
        self._held |= {key: value.encode() for key, value in zip(keys, values, strict=True)}

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self._held[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        self._ask()
        return self._held.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        scheduler = running()
        assert scheduler is not None
        until = math.inf if timeout is None else scheduler.now + timeout.total_seconds()
        while not self.check(keys):
            if scheduler.now >= until:
                raise dist.DistStoreError(f"nobody has set {[key for key in keys if key not in self._held]}")

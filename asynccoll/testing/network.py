"""The simulated network: links with latency and bandwidth, beacons, and the store."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from asynccoll import flight
from asynccoll.health.accounts import NOTE
from asynccoll.host.answering import QUESTION_BYTES
from asynccoll.testing.links import Link
from asynccoll.testing.primitives import FIRST_PID, sleep
from asynccoll.testing.scheduler import running

__all__ = [
    "Answers",
    "Memory",
    "Network",
    "SimulatedStore",
    "ask",
    "connect",
    "is_open",
    "listen",
    "look",
    "own_address",
    "process_state",
]

K = TypeVar("K")
#: How long it takes to ask the kernel of a nearby host.
_PROBE_SECONDS = 50e-6
#: How long a connection to a host that is gone seems open, with the keepalive options of ``host.lines``.
_KEEPALIVE_SECONDS = 8.0


class Network:
    """The nodes of the ranks, the links between them, their beacons, and which ranks are dead."""

    def __init__(self, link: Link, local: Link, node_of: Sequence[int]) -> None:
        self.dead: set[int] = set()
        self.store_is_lost = False
        self.node_of = node_of
        self._link = link
        self._local = local
        self._beacons: list[Beacon] = []  # by port, from 1
        self.memories: list[Memory] = []  # by descriptor
        self.answering: list[Answers] = []  # by port, from 1

    def link(self, src: int, dst: int) -> Link:
        """Return the link between two ranks."""
        return self._local if self.node_of[src] == self.node_of[dst] else self._link

    def in_flight(self) -> str:
        """Return a line for each call that a rank has in flight, from its flight recorder."""
        found = [flight.read(memoryview(memory.buffer)) for memory in self.memories if memory.descriptor >= 0]
        return "".join(
            f"rank {one.rank} waits in {call.name} at {call.place}\n"
            for one in sorted((one for one in found if one is not None), key=lambda one: one.rank)
            for call in one.calls
            if call.is_open and one.rank not in self.dead
        )

    def light(self, rank: int) -> tuple[Beacon, int]:
        """Return a new beacon of ``rank``, and its port."""
        self._beacons.append(Beacon(rank))
        return self._beacons[-1], len(self._beacons)

    def beacon(self, port: int) -> Beacon:
        """Return the beacon at ``port``."""
        return self._beacons[port - 1]

    def is_lit(self, rank: int) -> bool:
        """Whether ``rank`` has a beacon that is not closed."""
        return any(beacon.lit for beacon in self._beacons if beacon.rank == rank)

    def kill(self, rank: int, *, silent: bool = False, now: float = 0.0) -> None:
        """Close what the rank's process had open, as its kernel does; if ``silent``, only stop answering."""
        self.dead.add(rank)
        for beacon in self._beacons:
            if beacon.rank == rank and silent:
                beacon.silent_since = now
            elif beacon.rank == rank:
                beacon.lit = False


class Beacon:
    """A listening socket that never accepts."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lit: bool = True
        self.silent_since: float = math.inf

    def close(self) -> None:
        self.lit = False


class _Line:
    """A connection to a beacon."""

    def __init__(self, beacon: Beacon) -> None:
        self.beacon = beacon

    def is_open(self) -> bool:
        """Whether it is open as far as the local kernel knows, which sends keepalive probes."""
        scheduler = running()
        assert scheduler is not None
        return self.beacon.lit and scheduler.now < self.beacon.silent_since + _KEEPALIVE_SECONDS

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class Memory:
    """A simulated ``host.shared_memory.Memory``."""

    def __init__(self, size: int, name: str = "") -> None:
        self.buffer: mmap.mmap = mmap.mmap(-1, size)
        self.descriptor: int = -1
        scheduler = running()
        if name and scheduler is not None and scheduler.current is not None:
            self.rank: int = scheduler.current.rank
            self.descriptor = len(current.network.memories)
            current.network.memories.append(self)

    def close(self) -> None:
        self.descriptor = -1


class _Current:
    """Holds the network of the running simulation."""

    network: Network = Network(Link(), Link(), ())


current: _Current = _Current()


class Answers:
    """A simulated ``host.answering.Answers``, for notes of calls, and for accounts of where a rank stands.

    Whatever else others want to know, they read in the rank's memory (``look``).
    """

    def __init__(self, address: str, secret: bytes, answer: Callable[[str], Mapping[str, object]]) -> None:
        scheduler = running()
        assert scheduler is not None and scheduler.current is not None
        self.rank: int = scheduler.current.rank
        self.answer: Callable[[str], Mapping[str, object]] | None = answer
        current.network.answering.append(self)
        self.port: int = len(current.network.answering)

    def close(self) -> None:
        self.answer = None

    disown = close


def ask(
    peers: Mapping[K, tuple[str, int, bytes]],
    question: str,
    seconds: float,
    *,
    reach: float | None = None,
) -> dict[K, Mapping[str, object] | None]:
    """Simulate ``host.answering.ask``: each peer is asked once its link has delivered the question."""
    if not question.startswith((NOTE, "account")):
        return {}
    scheduler = running()
    assert scheduler is not None and scheduler.current is not None
    network, rank, began = current.network, scheduler.current.rank, scheduler.now
    answers: dict[K, Mapping[str, object] | None] = dict.fromkeys(peers)
    for peer, (_, port, _) in peers.items():
        asked = network.answering[port - 1]
        link = network.link(rank, asked.rank)
        sleep(max(0.0, began + link.seconds(len(question), scheduler.chance(rank)) - scheduler.now))
        is_there = asked.rank not in network.dead and not scheduler.stands_still(asked.rank)
        if asked.answer is not None and is_there and len(question.encode()) <= QUESTION_BYTES:
            answers[peer] = asked.answer(question)
    sleep(_PROBE_SECONDS if None not in answers.values() else seconds)
    return answers


def look(pid: int, descriptor: int) -> memoryview | None:
    """Simulate ``host.shared_memory.look``."""
    memory = current.network.memories[descriptor]
    is_there = memory.descriptor == descriptor and memory.rank not in current.network.dead
    return memoryview(memory.buffer) if is_there else None


def exit_code(_pid: int) -> int | None:
    """Return None: how a rank has ended is never known."""
    return None


def directory_for(_job: str) -> None:
    """Return None: simulated ranks write no dumps."""
    return


def process_state(pid: int) -> str:
    """Simulate ``host.shared_memory.process_state``."""
    scheduler = running()
    rank = pid - FIRST_PID
    if scheduler is None or rank in current.network.dead:
        return ""
    return "T" if scheduler.stands_still(rank) else "S"


def own_address(meeting_host: str | None) -> str:
    """Simulate ``host.network.own_address``."""
    return "127.0.0.1"


def listen(address: str) -> tuple[Beacon, int]:
    """Simulate ``host.lines.listen``."""
    scheduler = running()
    assert scheduler is not None and scheduler.current is not None
    return current.network.light(scheduler.current.rank)


def is_open(line: _Line) -> bool:
    """Simulate ``host.lines.is_open``."""
    return line.is_open()


def connect(peers: Mapping[K, tuple[str, int]], seconds: float) -> tuple[dict[K, _Line], list[K]]:
    """Simulate ``host.lines.connect``."""
    beacons = {peer: current.network.beacon(port) for peer, (_, port) in peers.items()}
    silent = [peer for peer, beacon in beacons.items() if beacon.silent_since < math.inf]
    sleep(seconds if silent else min(seconds, _PROBE_SECONDS))
    return {peer: _Line(one) for peer, one in beacons.items() if one.lit and peer not in silent}, silent


class SimulatedStore(dist.Store):
    """The store through which ranks rendezvous: a request takes time, and is served atomically at its end."""

    def __init__(self, link: Link, held: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._link = link
        self._held: dict[str, bytes] = {} if held is None else held

    def clone(self) -> SimulatedStore:
        return SimulatedStore(self._link, self._held)

    def _ask(self, size_bytes: int = 0) -> None:
        scheduler = running()
        if scheduler is not None and scheduler.current is not None:
            sleep(self._link.seconds(size_bytes, scheduler.chance(scheduler.current.rank)))
        if current.network.store_is_lost:
            raise dist.DistNetworkError("Connection reset by peer")

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

    def append(self, key: str, value: str) -> None:
        self._ask(len(value))
        self._held[key] = self._held.get(key, b"") + value.encode()

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

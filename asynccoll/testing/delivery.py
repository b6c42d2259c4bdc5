"""Delivery of messages between simulated ranks: when they arrive, and each rank's thread that handles them.

This module must not know what the messages are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import torch

from asynccoll.testing.network import Network
from asynccoll.testing.scheduler import Scheduler
from asynccoll.testing.threads import SimulatedThread

__all__ = ["CLOSED", "REFUSED", "Delivery"]

#: What a communication library says when a peer is gone.
CLOSED = "connection closed by peer"
#: What it says of a call that it does not accept.
REFUSED = "out of resources"


class Delivery:
    """When messages arrive, and the threads that then act on them."""

    def __init__(self, scheduler: Scheduler, network: Network, world_size: int) -> None:
        self.scheduler = scheduler
        self.network = network
        self._calls = [0] * world_size
        self._free_at = [0.0] * world_size  # by rank: when its last message has left
        #: by rank and number of its call: how many seconds longer the messages of that call take
        self._late: dict[tuple[int, int], float] = {}
        self._failing: set[int] = set()  # ranks whose next call is refused
        #: called at each call, with the rank and how many calls it has made
        self.observers: list[Callable[[int, int], object]] = []
        #: calls that do not match, which could not have worked on a real transport
        self.mismatches: list[str] = []
        self._cards = [_Card(scheduler) for _ in range(world_size)]

    def start(self, rank: int) -> None:
        """Start the rank's thread, as gloo has one."""
        self._cards[rank].thread = self.scheduler.add(rank, "gloo", self._cards[rank].run)

    def at(self, rank: int, time: float, act: Callable[[], object]) -> None:
        """Have the rank's thread call ``act`` at ``time``."""
        self._cards[rank].put(time, act)

    def within(self, rank: int, seconds: float, act: Callable[[], object]) -> None:
        """Have the rank's thread call ``act`` at some time within ``seconds`` from now."""
        self.at(rank, self.scheduler.now + seconds * self.scheduler.chance(rank).random(), act)

    def arrival(self, size_bytes: float, src: int, dst: int) -> float:
        """Return when a message arrives that leaves as soon as the rank's earlier messages have left."""
        link = self.network.link(src, dst)
        begins = max(self.scheduler.now, self._free_at[src])
        self._free_at[src] = begins + size_bytes / link.bandwidth
        late = self._late.get((src, self._calls[src]), 0.0)
        return begins + link.seconds(size_bytes, self.scheduler.chance(src)) + late

    def delay(self, rank: int, call: int | None, seconds: float) -> None:
        """Delay what the rank sends in call number ``call``, or in its next one, by ``seconds``."""
        self._late[rank, self._calls[rank] + 1 if call is None else call] = seconds

    def fail(self, rank: int) -> None:
        """Refuse the call that the rank is just making, or its next one."""
        self._failing.add(rank)

    def called(self, rank: int, what: str) -> None:
        """Note that ``rank`` makes one more call.

        Raises:
            RuntimeError: the call is refused.
        """
        self._calls[rank] += 1
        self.scheduler.tell(rank, what)
        for observer in self.observers:
            observer(rank, self._calls[rank])
        if rank in self._failing:
            self._failing.discard(rank)
            raise RuntimeError(REFUSED)


class _Card:
    """The network card of one rank: a thread that completes calls, and what it has to do when."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.thread: SimulatedThread | None = None
        self._scheduler = scheduler
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._idle = False

    def put(self, at: float, act: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, act))
        if self._idle and self.thread is not None:
            self._scheduler.wake_by(self.thread, at)

    def run(self) -> None:
        while True:
            until = self._due[0][0] if self._due else math.inf
            if until > self._scheduler.now:
                self._idle = True
                self._scheduler.park(until)
                self._idle = False
            else:
                with torch.inference_mode():  # native code writes in any mode
                    heapq.heappop(self._due)[2]()
                self._scheduler.point()

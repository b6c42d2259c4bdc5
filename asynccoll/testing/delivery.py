"""What carries messages between simulated ranks, and a thread of each rank that takes them in.

It must not know what the messages are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from asynccoll.testing.network import Network
from asynccoll.testing.scheduler import Scheduler
from asynccoll.testing.threads import SimulatedThread

__all__ = ["CLOSED", "REFUSED", "Delivery"]

#: What a library says whose peer is gone.
CLOSED = "connection closed by peer"
#: What it says of a call that it does not take.
REFUSED = "out of resources"


class Delivery:
    """When messages come, and who does then what is to be done."""

    def __init__(self, scheduler: Scheduler, network: Network, world_size: int) -> None:
        self.scheduler = scheduler
        self.network = network
        self._calls = [0] * world_size
        self._free_at = [0.0] * world_size  # when a rank's last message has left
        #: by rank: how much longer what it sends with its call of this number takes
        self._late: dict[tuple[int, int], float] = {}
        self._failing: set[int] = set()  # ranks whose next call is not taken
        #: told of each call of a rank, with how many it has made
        self.observers: list[Callable[[int, int], object]] = []
        #: what could not have worked on a real transport: calls that do not match
        self.mismatches: list[str] = []
        self._cards = [_Card(scheduler) for _ in range(world_size)]

    def start(self, rank: int) -> None:
        """Its thread, as gloo has one."""
        self._cards[rank].thread = self.scheduler.add(rank, "gloo", self._cards[rank].run)

    def at(self, rank: int, time: float, act: Callable[[], object]) -> None:
        """Have the rank's thread do ``act`` at that time."""
        self._cards[rank].put(time, act)

    def arrival(self, size_bytes: float, src: int, dst: int) -> float:
        """When a message comes that leaves as soon as the rank has sent what it sent before."""
        link = self.network.link(src, dst)
        begins = max(self.scheduler.now, self._free_at[src])
        self._free_at[src] = begins + size_bytes / link.bandwidth
        late = self._late.get((src, self._calls[src]), 0.0)
        return begins + link.seconds(size_bytes, self.scheduler.chance(src)) + late

    def delay(self, rank: int, call: int | None, seconds: float) -> None:
        """What the rank sends with this call, or with its next one, takes so much longer."""
        self._late[rank, self._calls[rank] + 1 if call is None else call] = seconds

    def fail(self, rank: int) -> None:
        """The call that the rank makes just now is not taken, or its next one."""
        self._failing.add(rank)

    def called(self, rank: int, what: str) -> None:
        """A rank makes one more call.

        Raises:
            RuntimeError: it is not taken.
        """
        self._calls[rank] += 1
        self.scheduler.tell(rank, what)
        for observer in self.observers:
            observer(rank, self._calls[rank])
        if rank in self._failing:
            self._failing.discard(rank)
            raise RuntimeError(REFUSED)


class _Card:
    """The thread of one rank that ends calls, and what it has to do when."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.thread: SimulatedThread | None = None
        self._scheduler = scheduler
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def put(self, at: float, act: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, act))
        if self.thread is not None:
            self._scheduler.wake(self.thread)

    def run(self) -> None:
        while True:
            if not self._due:
                self._scheduler.park()
            elif self._due[0][0] > self._scheduler.now:
                self._scheduler.park(self._due[0][0])
            else:
                with torch.inference_mode():  # no mode keeps native code from writing
                    heapq.heappop(self._due)[2]()
                self._scheduler.point()

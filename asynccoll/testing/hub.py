"""What a simulated rank shares with the others of its host; stands in for ``backends.memory.hub.Hub``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asynccoll import host
from asynccoll.backends.memory.layout import Layout
from asynccoll.testing.delivery import Delivery
from asynccoll.testing.shared_memory import Memory, Parking, SimulatedRegion

if TYPE_CHECKING:
    from asynccoll.transport.communicator import Opening

__all__ = ["Host", "SimulatedHub"]

#: The bytes of a slot, one of these at random, or more if an item of each rank needs more: so small that
#: nearly every call takes several steps.
_SLOT_BYTES = (64, 256, 1024, 4096)
_LARGEST_ITEM_BYTES = 16
#: The fraction of ranks that are told that there are enough cores: those poll longer before they sleep.
_UNCROWDED = 0.1


class Host:
    """The shared memory of one simulated world, and the hubs of its ranks."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.memories: dict[str, Memory] = {}
        self.hubs: dict[int, SimulatedHub] = {}

    def memory(self, opening: Opening) -> Memory:
        """Return the memory of a lane in one epoch."""
        found = self.memories.get(opening.name)
        if found is None:
            drawn = self.delivery.scheduler.chance(opening.ranks[0]).choice(_SLOT_BYTES)
            layout = Layout(opening.size, max(drawn, -(-opening.size * _LARGEST_ITEM_BYTES // 64) * 64))
            found = self.memories[opening.name] = Memory(layout)
        return found

    def kill(self, rank: int) -> None:
        """Tell the other ranks that the process is gone, each after its link's latency."""
        for one, hub in self.hubs.items():
            if one != rank:
                at = self.delivery.arrival(0, rank, one)
                self.delivery.at(one, at, partial(hub.watcher.has_gone, rank))


class _Watcher:
    """A simulated ``backends.memory.watcher.Watcher``: a thread that moves calls when its bell rings."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self._bell = host.Event()
        self._engines: list[weakref.ref[Any]] = []
        self._stopped = False
        self._thread = host.Thread(target=self._run, name="asynccoll-memory", daemon=True)
        self._thread.start()

    def add(self, engine: object) -> None:
        if not any(one() is engine for one in self._engines):
            self._engines.append(weakref.ref(engine))

    def ring(self) -> None:
        self._bell.set()

    def has_gone(self, rank: int) -> None:
        """Note that the process of another rank has ended."""
        self.gone.add(rank)
        self.ring()

    def stop(self) -> None:
        self._stopped = True
        self.ring()
        if host.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped:
            self._bell.wait()
            self._bell.clear()
            for one in list(self._engines):
                if (engine := one()) is not None:
                    engine.attend()
                del engine


class SimulatedHub:
    """The hub of one rank."""

    def __init__(self, shared: Host, rank: int) -> None:
        scheduler = shared.delivery.scheduler
        self.watcher: _Watcher = _Watcher()
        self.crowded: bool = scheduler.chance(rank).random() >= _UNCROWDED
        self._host = shared
        self._rank = rank
        shared.hubs[rank] = self

    def region(self, opening: Opening) -> tuple[SimulatedRegion, Parking]:
        """Return the memory of a lane. Waits until all of its ranks have called."""
        assert opening.clients is not None
        opening.clients.meet(opening.name, opening.rank, opening.size, opening.meeting, opening.given_up)
        memory = self._host.memory(opening)
        called = lambda text: self._host.delivery.called(self._rank, f"{text} on {opening.name}")  # noqa: E731  # short
        return SimulatedRegion(memory, opening.rank, called), Parking(memory, opening.rank)

    def later(self, job: Callable[[], object]) -> None:
        """Run ``job``, which may wait, on a thread of its own."""
        host.Thread(target=job, name="memory-helper", daemon=True).start()

    def ring(self, rank: int) -> None:
        """Have the watcher of ``rank`` look."""
        self._host.hubs[rank].watcher.ring()

    def close(self) -> None:
        self.watcher.stop()

    def disown(self) -> None:
        """Do nothing: simulations do not fork."""

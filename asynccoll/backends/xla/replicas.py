"""Replicas that are threads of one process: where they meet, and the one order of their launches.

On the CPU the ranks of torch_xla are threads. Each call waits here, off the device, until all ranks of its
group have made theirs. Then the calls are compared, and launched on all of their devices together. So a late
rank occupies no device, a mismatch is an error instead of the end of the process, and lanes may be used in
any order.

This module knows threads and calls, but not torch_xla.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import Protocol

import torch.distributed as dist

from asynccoll.errors import CollectiveError, CollectiveTimeoutError, InvalidArgumentError


class Arrival(Protocol):
    """One rank's side of a call."""

    def fail(self, error: BaseException) -> None: ...


class Replicas:
    """One world of replica threads, from their ``initialize`` to their ``finalize``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store: dist.Store = dist.HashStore()
        #: held during each launch on all devices of a group, so that all devices see the same order
        self.launching: threading.Lock = threading.Lock()
        self.joined: set[int] = set()
        self._lock = threading.Lock()
        self._rooms: dict[str, Room] = {}

    def room(self, name: str, size: int) -> Room:
        """Return the room in which the calls of the communicator ``name`` meet."""
        with self._lock:
            return self._rooms.setdefault(name, Room(size))

    def leave(self, name: str, index: int) -> None:
        """Note that member ``index`` is done with the communicator ``name``; forget the room once all are."""
        with self._lock:
            room = self._rooms.get(name)
            if room is not None and room.leave(index):
                del self._rooms[name]


class Room:
    """The calls of one communicator, by their place in its order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._places: dict[int, dict[int, Arrival]] = {}
        self._next = 1
        self._left: set[int] = set()
        self._error: CollectiveError | None = None

    def arrive(self, place: int, index: int, call: Arrival) -> bool:
        """Add a rank's call; return whether all have arrived, so that ``take`` may have calls to return."""
        with self._lock:
            error = self._error
            if error is None:
                here = self._places.setdefault(place, {})
                here[index] = call
                return len(here) == self._size
        call.fail(error)
        return False

    def take(self) -> list[Arrival] | None:
        """Return the calls of all ranks at the next place in the order, or None if they are not complete."""
        with self._lock:
            here = self._places.get(self._next, {})
            if len(here) < self._size:
                return None
            del self._places[self._next]
            self._next += 1
            return [here[index] for index in range(self._size)]

    def leave(self, index: int) -> bool:
        """Note that a rank makes no more calls here; return whether this is so for all ranks."""
        self._left.add(index)
        return len(self._left) == self._size

    def give_up(self, error: CollectiveError) -> None:
        """Note that a rank will not arrive any more: fail the calls that wait for it, and later ones."""
        with self._lock:
            self._error = self._error or error
            waiting = [call for here in self._places.values() for call in here.values()]
            self._places.clear()
        for call in waiting:
            call.fail(error)


_gathering: list[Replicas] = []
_changed = threading.Condition()


def join(rank: int, size: int, timeout: float) -> Replicas:
    """Join the world of this process's replicas, and return it once all of them have joined.

    Raises:
        CollectiveTimeoutError: a replica did not join within ``timeout`` seconds; says which.
        InvalidArgumentError: this rank has joined already, from another thread.
    """
    deadline = monotonic() + timeout
    with _changed:
        if not _gathering:
            _gathering.append(Replicas(size))
        world = _gathering[0]
        if rank in world.joined:
            raise InvalidArgumentError(
                f"replica {rank} is being initialized by another thread: one thread per device calls "
                "ac.initialize('xla-tpu'), as ac.spawn starts them"
            )
        world.joined.add(rank)
        if len(world.joined) == size:
            _gathering.remove(world)
        _changed.notify_all()
        _changed.wait_for(lambda: len(world.joined) == size, deadline - monotonic())
        missing = sorted(set(range(size)) - world.joined)
        if missing:
            world.joined.discard(rank)
            raise CollectiveTimeoutError(
                f"replicas {missing} of {size} did not call ac.initialize('xla-tpu') within {timeout} s"
            )
    return world

"""One order of starts for all lanes of a group, where the device needs one (nccl on several GPUs).

NCCL kernels of different communicators can wait for each other when they start in different order on
different ranks. There, the group's first rank passes its lanes through a turnstile, one operation at
a time, and announces each passage through the store; the others let the same lane pass at the same
place. The default lane does not go through it and never pays.

A passage is for one operation of one epoch. Where that operation was given up meanwhile (``cut``), the lane
goes through with nothing, so that every rank lets as many through.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from asynccoll import host

if TYPE_CHECKING:
    from asynccoll.host.store import Clients

__all__ = ["Turnstile"]

#: So long a follower waits in the store before it looks whether it is to end.
_SLICE = timedelta(seconds=1)
_PAUSE_SECONDS = 0.001


class Passing(Protocol):
    """A lane, as the turnstile lets its operations through."""

    name: str
    key: str

    def next_epoch_to_pass(self) -> int | None:
        """The epoch of its next operation that waits here; None if none does."""

    def admit(self, epoch: int) -> None:
        """Its next operation may start: that of the first rank's ``epoch``."""


class Passengers(Protocol):
    """The group whose lanes go through one turnstile."""

    size: int
    rank: int

    @property
    def key(self) -> str:
        """The name by which its members meet."""

    def meant(self, name: str, key: str) -> Passing | None:
        """The lane whose ranks meet by ``key``, opened if it is the next of its name."""


class Turnstile:
    """The turnstile of one group, on one rank."""

    def __init__(self, group: Passengers, clients: Clients) -> None:
        self._group = group
        self._clients = clients
        self._store = clients.take()
        self._thread: host.Thread | None = None
        self._closed = False
        self._leads = group.rank == 0
        self._lock = host.Lock()
        self._waiting: deque[Passing] = deque()  # on the first rank: who asked, in order
        self._occupied = False
        self._passed = 0
        self._free = host.Event()
        self._free.set()
        if not self._leads:
            self._thread = host.Thread(target=self._follow, name="asynccoll-order", daemon=True)
            self._thread.start()

    def request(self, lane: Passing) -> None:
        """An operation of ``lane`` is queued and wants to start."""
        if not self._leads:
            return  # it starts when the first rank's does
        with self._lock:
            self._waiting.append(lane)
        self._admit()

    def release(self) -> None:
        """The operation that was let through has issued its last call."""
        if self._leads:
            with self._lock:
                self._occupied = False
            self._admit()
        else:
            self._free.set()

    def _admit(self) -> None:
        with self._lock:
            if self._occupied:
                return
            epoch = None
            while epoch is None:
                if not self._waiting:
                    return
                lane = self._waiting.popleft()
                epoch = lane.next_epoch_to_pass()  # None: what asked has been given up
            self._occupied = True
            # A key for each follower, so that one who leaves can wake itself by setting its own.
            keys = [self._key(self._passed, rank) for rank in range(1, self._group.size)]
            said = json.dumps([lane.name, lane.key, epoch])
            try:
                self._store.multi_set(keys, [said] * len(keys))  # type: ignore[attr-defined]  # stub
            except RuntimeError:  # the store is gone: nobody passes any more, and the operations tell
                return
            self._passed += 1
        lane.admit(epoch)

    def _follow(self) -> None:
        try:
            while (said := self._next()) is not None:
                name, key, epoch = json.loads(said)
                lane = self._named(name, key)
                if lane is None:
                    return
                self._free.clear()
                lane.admit(epoch)
                self._free.wait()
        except RuntimeError:  # the store went with rank 0: the operations themselves tell
            return

    def _next(self) -> bytes | None:
        """What the first rank lets through next; None once this rank leaves."""
        key = self._key(self._passed, self._group.rank)
        while not self._closed:
            try:
                self._store.wait([key], _SLICE)
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # nothing yet
                continue
            said = self._store.get(key)
            if self._closed:
                return None
            self._passed += 1
            with contextlib.suppress(NotImplementedError, RuntimeError):
                self._store.delete_key(key)
            return said
        return None

    def _named(self, name: str, key: str) -> Passing | None:
        """The lane that is meant, which this rank may have yet to open again after a close."""
        while not self._closed:
            lane = self._group.meant(name, key)
            if lane is not None:
                return lane
            host.sleep(_PAUSE_SECONDS)
        return None

    def close(self) -> None:
        """End the thread: one that still waits in the store when the interpreter goes aborts it."""
        self._closed = True
        self._free.set()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError), self._clients.borrow() as store:
                store.set(self._key(self._passed, self._group.rank), "")
            self._thread.join(timeout=1.0)

    def _key(self, place: int, rank: int) -> str:
        return f"asynccoll/order/{self._group.key}/{place}/{rank}"

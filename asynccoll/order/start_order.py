"""One order of starts for the lanes of a group, where the device needs one (nccl on several GPUs).

NCCL kernels of two communicators can deadlock if ranks launch them in different order. So there the group's
first rank leads: one lane at a time passes its *turnstile* with one operation, and each passage is announced
through the store. A thread on every other rank follows: it lets the same lanes pass in the same order, one
at a time, each until its operation has issued its last native call. The default lane has no turnstile, so its
calls never wait for the store.

A passage is for one operation of one epoch. If a refusal has cancelled that operation meanwhile (``cut``),
its lane passes without issuing anything, so that every rank counts the same passages.

Locks are taken in the order turnstile, then lane: the leader holds its own while it asks a lane what there is
to start. So a lane calls ``request`` and ``release`` without its lock. ``admit`` is called with neither held,
because the lane may issue its operation in there and call ``release``.
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

#: How long a follower waits in the store before it checks whether it is to stop.
_SLICE = timedelta(seconds=1)
_PAUSE_SECONDS = 0.001


class Passing(Protocol):
    """The queue of a lane, as the turnstile lets its operations through."""

    name: str
    key: str

    def next_epoch_to_pass(self) -> int | None:
        """The epoch of its next operation that waits for a passage; None if none does."""

    def admit(self, epoch: int) -> None:
        """Its next operation may start; ``epoch`` is the one in which the first rank starts it."""


class Passengers(Protocol):
    """The group whose lanes pass one turnstile."""

    size: int
    rank: int

    @property
    def key(self) -> str:
        """The name by which its members meet."""

    def meant(self, name: str, key: str) -> Passing | None:
        """That of the lane whose ranks meet by ``key``, opened if it is the next of its name."""


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
        self._waiting: deque[Passing] = deque()  # on the first rank: the lane of each request, in order
        self._occupied = False
        self._passed = 0  # how many passages there were; the number of the next one
        self._free = host.Event()
        self._free.set()
        if not self._leads:
            self._thread = host.Thread(target=self._follow, name="asynccoll-order", daemon=True)
            self._thread.start()

    def request(self, lane: Passing) -> None:
        """An operation of ``lane`` is queued and wants to start. Called without the lane's lock."""
        if not self._leads:
            return  # it starts when the first rank has started its own
        with self._lock:
            self._waiting.append(lane)
        self._admit()

    def release(self) -> None:
        """The operation that was let through has issued its last call. Called without the lane's lock."""
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
                epoch = lane.next_epoch_to_pass()  # None: the operation that asked was given up
            self._occupied = True
            # A key for each follower, so that one that leaves can wake its own thread by setting its own.
            keys = [self._key(self._passed, rank) for rank in range(1, self._group.size)]
            announced = json.dumps([lane.name, lane.key, epoch])
            try:
                self._store.multi_set(keys, [announced] * len(keys))  # type: ignore[attr-defined]  # stub
            except RuntimeError:
                # The store is gone: the turnstile stays occupied, so nothing starts any more, and waiters
                # learn from their operations which rank is lost.
                return
            self._passed += 1
        lane.admit(epoch)

    def _follow(self) -> None:
        try:
            while (announced := self._next()) is not None:
                name, key, epoch = json.loads(announced)
                lane = self._named(name, key)
                if lane is None:
                    return
                self._free.clear()
                lane.admit(epoch)
                self._free.wait()
        except RuntimeError:  # the store went with its rank: waiters learn that from their operations
            return

    def _next(self) -> bytes | None:
        """The announcement of the next passage; None once this rank leaves."""
        key = self._key(self._passed, self._group.rank)
        while not self._closed:
            try:
                self._store.wait([key], _SLICE)
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # nothing yet
                continue
            announced = self._store.get(key)
            if self._closed:
                return None
            self._passed += 1
            with contextlib.suppress(NotImplementedError, RuntimeError):
                self._store.delete_key(key)
            return announced
        return None

    def _named(self, name: str, key: str) -> Passing | None:
        """That of the lane that is meant, which this rank may have yet to open again after a close."""
        while not self._closed:
            lane = self._group.meant(name, key)
            if lane is not None:
                return lane
            host.sleep(_PAUSE_SECONDS)
        return None

    def close(self) -> None:
        """End the thread: still waiting in the store at exit, it would abort the interpreter."""
        self._closed = True
        self._free.set()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError), self._clients.borrow() as store:
                store.set(self._key(self._passed, self._group.rank), "")
            self._thread.join(timeout=1.0)

    def _key(self, passage: int, rank: int) -> str:
        return f"asynccoll/order/{self._group.key}/{passage}/{rank}"

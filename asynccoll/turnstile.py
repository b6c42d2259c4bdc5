"""One order of starts for all lanes of a group, where the device needs one (nccl on several GPUs).

NCCL kernels of different communicators can wait for each other when they start in different order on
different ranks. There, the group's first rank passes its lanes through a turnstile, one operation at
a time, and announces each passage through the store; the others let the same lane pass at the same
place. The default lane does not go through it and never pays.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccoll.group import Group
    from asynccoll.lane import Lane
    from asynccoll.store import Clients

__all__ = ["Turnstile"]

_FOR_EVER = timedelta(days=365)


class Turnstile:
    """The turnstile of one group, on one rank."""

    def __init__(self, group: Group, clients: Clients) -> None:
        self._group = group
        self._clients = clients
        self._store = clients.take()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._leads = group.rank == 0
        self._lock = threading.Lock()
        self._waiting: deque[Lane] = deque()  # on the first rank: who asked, in order
        self._occupied = False
        self._passed = 0
        self._free = threading.Event()
        self._free.set()
        if not self._leads:
            self._thread = threading.Thread(target=self._follow, name="asynccoll-order", daemon=True)
            self._thread.start()

    def request(self, lane: Lane) -> None:
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
            if self._occupied or not self._waiting:
                return
            self._occupied = True
            lane = self._waiting.popleft()
            # A key for each follower, so that one who leaves can wake itself by setting its own.
            keys = [self._key(self._passed, rank) for rank in range(1, self._group.size)]
            self._store.multi_set(keys, [lane.name] * len(keys))  # type: ignore[attr-defined]  # stub
            self._passed += 1
        lane.admit()

    def _follow(self) -> None:
        while not self._closed:
            key = self._key(self._passed, self._group.rank)
            try:
                self._store.wait([key], _FOR_EVER)
                name = self._store.get(key).decode()
            except RuntimeError:  # the store went with rank 0: the operations themselves tell
                return
            if self._closed:
                return
            self._passed += 1
            self._free.clear()
            self._group.lane(name).admit()
            self._free.wait()

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

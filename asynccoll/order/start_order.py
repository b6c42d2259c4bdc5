"""One start order for the operations of a group's lanes, where the device requires it (nccl on several GPUs).

NCCL kernels of two communicators can deadlock if ranks launch them in different orders. So on nccl, rank 0 of
the group leads: it starts one operation at a time, from whichever lane asked first, and announces each start
through the store. A thread on every other rank replays the announcements: it starts the next operation of the
same lane, and moves on to the next announcement once that operation has made its last native call. This has
two consequences for users. Calls on two lanes start in rank 0's order everywhere, so a rank that waits for
its call on one lane before it makes its call on the other can deadlock if rank 0 made them in the opposite
order. And the default lane is exempt, so that its calls never wait for the store: only its own calls are
ordered among each other.

An announcement is for one operation in one epoch of its lane (``cut``). If a refusal has since cancelled that
operation, the lane takes its turn without starting anything, so that all ranks count the same turns.

Lock order: the lock of the start order, then a lane's, because the leader holds its own lock while it asks a
lane whether anything waits. So a lane calls ``request`` and settles its turn without holding its lock, and
``admit`` is called without holding the lock here: the lane may issue the whole operation in that call, and
settle its turn in it. Ctrl-C may strike the leader at any point: what remains is then done, and it is raised.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from asynccoll import host
from asynccoll.host.store import Clients
from asynccoll.transport.completion import Promise

#: How long a follower blocks in the store before it checks whether the group has closed.
_SLICE = timedelta(seconds=1)
_JOIN_SECONDS = 2.0  # longer than a slice: the thread must not be in the store when the interpreter ends
_POLL_SECONDS = 0.001


class OrderedLane(Protocol):
    """The queue of a lane whose operations start in the group's order."""

    name: str
    key: str

    def next_epoch_to_start(self) -> int | None:
        """Return the epoch of the next operation that waits to be started; None if none does."""

    def admit(self, epoch: int, turn: Promise) -> None:
        """Let the next operation start once it is queued; ``epoch`` is the one in which rank 0 starts it.

        The lane settles ``turn`` once that operation has made its last native call. Giving it the same turn
        again changes nothing.
        """


class LaneGroup(Protocol):
    """The group whose lanes share one start order."""

    size: int
    rank: int

    @property
    def key(self) -> str:
        """The name under which its members meet in the store."""

    def find_queue(self, name: str, key: str) -> OrderedLane | None:
        """Return the queue of the lane ``name`` with this ``key``; open the lane if it is not open yet.

        None while this rank still has an earlier lane of that name open, or has as many lanes as it may have.
        """


class StartOrder:
    """The start order of one group, on one rank."""

    def __init__(self, group: LaneGroup, clients: Clients) -> None:
        self._group = group
        self._clients = clients
        self._store = clients.take()
        self._thread: host.Thread | None = None
        self._closed = False
        self._leads = group.rank == 0
        self._lock = host.Lock()
        self._requests: deque[OrderedLane] = deque()  # on the leader: one entry for each queued operation
        #: on the leader: the lane and epoch to be announced next, once chosen
        self._next: tuple[OrderedLane, int] | None = None
        #: on the leader: the lane and epoch that were announced last, until that lane has its turn
        self._admitting: tuple[OrderedLane, int] | None = None
        self._announced = 0  # the number of the next announcement
        self._turn = Promise()  # the latest turn, settled once its operation has made its last native call
        self._turn.settle()
        if not self._leads:
            self._thread = host.Thread(target=self._follow, name="asynccoll-order", daemon=True)
            self._thread.start()

    def request(self, lane: OrderedLane) -> None:
        """Ask to start an operation of ``lane``, which is queued. Called without the lane's lock."""
        if not self._leads:
            return  # it starts once rank 0 has announced the start of its own operation
        self._requests.append(lane)
        self._admit_next()

    def _admit_next(self) -> None:
        """Give the next turn, if the latest one is over."""
        try:
            self._admit()
        except BaseException:
            self._admit()  # the rest
            raise

    def _admit(self) -> None:
        while True:
            with self._lock:
                if self._admitting is None and self._turn.done() and not self._closed:
                    self._announce()
                admitting, turn = self._admitting, self._turn
            if admitting is None:
                return
            lane, epoch = admitting
            lane.admit(epoch, turn)
            with self._lock:
                if self._turn is turn:
                    self._admitting = None

    def _announce(self) -> None:
        """Choose the next operation and announce it to the followers. With the lock held."""
        while self._next is None:
            if not self._requests:
                return
            lane = self._requests[0]
            epoch = lane.next_epoch_to_start()  # None: the operation that asked was given up
            self._next = None if epoch is None else (lane, epoch)
            del self._requests[0]
        lane, epoch = self._next
        # Each follower has a separate key, so that ``close`` can end the wait of its own thread.
        keys = [self._key(self._announced, rank) for rank in range(1, self._group.size)]
        announced = json.dumps([lane.name, lane.key, epoch])
        turn = Promise()
        turn.add_callback(self._admit_next)
        try:
            self._store.multi_set(keys, [announced] * len(keys))  # type: ignore[attr-defined]  # stub
        except RuntimeError:
            # The store is gone. Nothing starts any more, and waiters learn from their operations which rank
            # is lost. (After Ctrl-C, the same announcement is made again.)
            return
        self._announced += 1
        self._admitting, self._next, self._turn = self._next, None, turn

    def _follow(self) -> None:
        while (announcement := self._next_announcement()) is not None:
            name, key, epoch = json.loads(announcement)
            lane = self._wait_for_lane(name, key)
            if lane is None:
                return
            turn = self._turn = Promise()
            if self._closed:  # after the turn was stored: else ``close`` settles it
                return
            over = host.Lock()
            over.acquire()
            turn.add_callback(over.release)
            lane.admit(epoch, turn)
            over.acquire()

    def _next_announcement(self) -> bytes | None:
        """Wait for the next announcement, and return it.

        None once the group has closed or the store is gone, which waiters learn from their operations.
        """
        key = self._key(self._announced, self._group.rank)
        while not self._closed:
            try:
                self._store.wait([key], _SLICE)
                announcement = self._store.get(key)
            except dist.DistNetworkError:
                return None
            except RuntimeError:  # timed out: nothing announced yet
                continue
            if self._closed:
                return None
            self._announced += 1
            with contextlib.suppress(RuntimeError):  # not every store can delete keys
                self._store.delete_key(key)
            return announcement
        return None

    def _wait_for_lane(self, name: str, key: str) -> OrderedLane | None:
        """Wait until this rank has closed the lanes that are in the way of this one, and return its queue.

        None once the group has closed.
        """
        while not self._closed:
            lane = self._group.find_queue(name, key)
            if lane is not None:
                return lane
            host.sleep(_POLL_SECONDS)
        return None

    def close(self) -> None:
        """End the thread. If it were still blocked in the store at exit, it would abort the interpreter."""
        self._closed = True
        self._turn.settle()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError), self._clients.borrow() as store:
                store.set(self._key(self._announced, self._group.rank), "")
            self._thread.join(timeout=_JOIN_SECONDS)

    def _key(self, number: int, rank: int) -> str:
        return f"asynccoll/order/{self._group.key}/{number}/{rank}"

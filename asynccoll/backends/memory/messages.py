"""The messages of one lane on one rank, in all of the lane's epochs, in a region for each other rank.

Two ranks open their region with their first message to each other; until it is open, messages are queued in
order. Opening waits for the other rank, so it is done on another thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

from asynccoll.backends.api import Completion, InProgress, Promise, Ready, host
from asynccoll.backends.memory.layout import CLOSED
from asynccoll.backends.memory.pair import Pair
from asynccoll.errors import CollectiveError, PeerLostError

#: How long closing waits for threads that open regions to notice that these are no longer needed.
_GIVE_UP_SECONDS = 5.0
#: How long closing waits for the other rank of each region to make room for the last acknowledgements.
_FLUSH_SECONDS = 1.0

Begin = Callable[[Pair], Completion]


class Lane(Protocol):
    """The lane that the messages belong to, as its ``engine.Engine`` knows it."""

    def died(self) -> Sequence[int]:
        """Return the ranks that have ended without leaving the lane."""


class Messages:
    """The messages between this rank and the others of a lane. Ranks are indices in the lane's group."""

    def __init__(
        self,
        open_pair: Callable[[int, Messages], Pair],
        later: Callable[[Callable[[], object]], object],
        lane: Lane,
    ) -> None:
        """``open_pair`` opens the region of two ranks, and may wait; ``later`` runs a job on a thread."""
        self._open_pair = open_pair
        self._lane = lane
        self._later = later
        self._lock = host.Lock()
        self._pairs: dict[int, Pair] = {}
        self._waiting: defaultdict[int, deque[tuple[Begin, Promise]]] = defaultdict(deque)
        self._asked: set[int] = set()  # peers for whose regions a thread was requested
        self._openers: set[int] = set()  # peers whose regions a thread is opening, or has opened
        self._opening = InProgress()
        self._closed: tuple[int, CollectiveError] | None = None

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        """Send the flat ``x`` to ``dst``."""
        return self._begin(dst, lambda pair: pair.send(x, tag))

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        """Receive the next message from ``src`` with that tag into the flat ``x``."""
        return self._begin(src, lambda pair: pair.recv(x, tag))

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Tell the receiver, instead of a send, that there is no message, and why."""
        self._begin(dst, lambda pair: pair.refuse(tag, why))

    def _begin(self, peer: int, begin: Begin) -> Completion:
        pair = self._pairs.get(peer)
        if pair is not None:
            return begin(pair)
        promise = Promise()
        with self._lock:
            pair = self._pairs.get(peer)
            if pair is None:
                if self._closed is not None:
                    return Ready(self._closed[1])
                self._waiting[peer].append((begin, promise))
        if pair is not None:
            return begin(pair)
        if peer not in self._asked:
            self._ask(peer)
        return promise

    def _ask(self, peer: int) -> None:
        """Have a thread open the region to ``peer``.

        The peer is noted in ``_asked`` first, since the thread removes the note if opening fails, which may
        be at once. An interrupt here removes it too, so that the next message asks again.
        """
        try:
            self._asked.add(peer)
            self._later(partial(self._open, peer))
        except BaseException:
            self._asked.discard(peer)
            raise

    def _open(self, peer: int) -> None:
        with self._lock:
            if peer in self._openers:
                return
            self._openers.add(peer)
        with self._opening:
            try:
                pair = self._open_pair(peer, self)
            except BaseException as error:  # for the waiters of the messages to raise, not this thread
                self._give_up(peer, self.ended() or error)
            else:
                self._opened(peer, pair)

    def _opened(self, peer: int, pair: Pair) -> None:
        with self._lock:
            begun = [(_begun(begin, pair), promise) for begin, promise in self._waiting.pop(peer, ())]
            self._pairs[peer] = pair
            closed = self._closed
        if closed is not None:
            pair.stop(*closed)
        for completion, promise in begun:
            promise.follow(completion)

    def _give_up(self, peer: int, error: BaseException) -> None:
        with self._lock:
            waiting = self._waiting.pop(peer, ())
            self._openers.discard(peer)
            self._asked.discard(peer)
        for _, promise in waiting:
            promise.settle(error)

    def follow(self, lane: Lane) -> None:
        """Ask ``lane`` from now on which ranks have ended: it is the lane's engine in a new epoch."""
        self._lane = lane

    def died(self) -> Sequence[int]:
        """Return the ranks that have ended without leaving the lane."""
        return self._lane.died()

    def ended(self) -> CollectiveError | None:
        """Return why no region is opened any more, or None if they still are."""
        if self._closed is not None:
            return self._closed[1]
        died = self.died()
        return PeerLostError(f"rank {', '.join(map(str, died))} ended") if died else None

    def stop(self, state: int, error: CollectiveError) -> None:
        """Leave all regions, and open no more: messages in flight end here, and soon on the other ranks."""
        with self._lock:
            self._closed = self._closed or (state, error)
            pairs = list(self._pairs.values())
        with ExitStack() as ends:  # all of them, though Ctrl-C may cut a flush short
            for pair in pairs:
                ends.callback(pair.stop, state, error)  # runs after ``flush``: callbacks run in reverse order
                if state == CLOSED:
                    ends.callback(pair.flush, _FLUSH_SECONDS)

    def join(self) -> None:
        """Wait for the threads that are opening regions, since they use the store."""
        self._opening.wait(_GIVE_UP_SECONDS)


def _begun(begin: Begin, pair: Pair) -> Completion:
    """Begin a message that waited for its region; only its own waiter gets an error that this raises."""
    try:
        return begin(pair)
    except Exception as error:
        return Ready(error)

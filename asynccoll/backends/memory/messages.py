"""The messages of one lane on one rank, in all of its epochs: a region for each other rank, once needed.

A region is opened by both of its ranks, with their first message to each other; until then messages wait in
their order. Who opens it may have to wait, so that is done on a thread of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from asynccoll.backends.api import Completion, InProgress, Promise, host
from asynccoll.backends.memory.layout import CLOSED
from asynccoll.backends.memory.pair import Pair
from asynccoll.errors import CollectiveError, PeerLostError

__all__ = ["Messages"]

#: How long a thread that opens a region which nobody wants any more may take to notice.
_GIVE_UP_SECONDS = 5.0
#: How long a rank that is alive may take to read what there is.
_FLUSH_SECONDS = 1.0

Begin = Callable[[Pair], Completion]


class Lane(Protocol):
    """What the messages belong to (``engine.Engine``)."""

    def died(self) -> Sequence[int]:
        """The ranks that have ended without leaving it."""
        ...


class Messages:
    """Ranks are indices in the lane's group."""

    def __init__(
        self,
        open_pair: Callable[[int, Messages], Pair],
        later: Callable[[Callable[[], object]], object],
        lane: Lane,
    ) -> None:
        """``open_pair`` opens the region of two ranks; ``later`` runs what may wait on a thread."""
        self._open_pair = open_pair
        self._lane = lane
        self._later = later
        self._lock = host.Lock()
        self._pairs: dict[int, Pair] = {}
        self._waiting: defaultdict[int, deque[tuple[Begin, Promise]]] = defaultdict(deque)
        self._asked: set[int] = set()  # whose regions are to be opened
        self._openers: set[int] = set()  # and whose somebody opens
        self._opening = InProgress()
        self._closed: tuple[int, CollectiveError] | None = None

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        """The flat ``x`` to ``dst``."""
        return self._begin(dst, lambda pair: pair.send(x, tag))

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        """Into the flat ``x`` what ``src`` sends."""
        return self._begin(src, lambda pair: pair.recv(x, tag))

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """In place of a send, tell its receiver."""
        self._begin(dst, lambda pair: pair.refuse(tag, why))

    def _begin(self, peer: int, begin: Begin) -> Completion:
        pair = self._pairs.get(peer)
        if pair is not None:
            return begin(pair)
        promise = Promise()
        with self._lock:
            pair = self._pairs.get(peer)
            if pair is None:
                self._waiting[peer].append((begin, promise))
        if pair is not None:
            return begin(pair)
        if peer not in self._asked:
            self._ask(peer)
        return promise

    def _ask(self, peer: int) -> None:
        """Have the region opened; noted first, for it may fail at once, and unsaid if an interrupt comes."""
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
            except BaseException as error:  # raised in the waiters of its messages, not in this thread
                self._give_up(peer, self.ended() or error)
            else:
                self._opened(peer, pair)

    def _opened(self, peer: int, pair: Pair) -> None:
        with self._lock:
            begun = [(begin(pair), promise) for begin, promise in self._waiting.pop(peer, ())]
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
        """From now on the lane's collectives go by this."""
        self._lane = lane

    def died(self) -> Sequence[int]:
        """The ranks with which the lane is lost."""
        return self._lane.died()

    def ended(self) -> CollectiveError | None:
        """Why no region is opened any more; None while they are."""
        if self._closed is not None:
            return self._closed[1]
        died = self.died()
        return PeerLostError(f"rank {', '.join(map(str, died))} ended") if died else None

    def stop(self, state: int, error: CollectiveError) -> None:
        """Leave: what is in flight ends, here and soon on the others. No region is opened any more."""
        with self._lock:
            self._closed = self._closed or (state, error)
            pairs = list(self._pairs.values())
        for pair in pairs:
            if state == CLOSED:
                pair.flush(_FLUSH_SECONDS)
            pair.stop(state, error)

    def join(self) -> None:
        """Wait for the threads that open regions: they ask the store."""
        self._opening.wait(_GIVE_UP_SECONDS)

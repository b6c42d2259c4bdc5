"""One simulated communicator: calls in rounds, each over on a rank once all that it needs has arrived there.

A call's output holds garbage until the call is over, and its input is read at the last possible moment. If
the two share memory, only one of these is possible: by chance, either the input is read at the call, and
garbage from then on, or it is read late. A lost rank fails the calls of its neighbors, as in gloo's ring; the
other ranks wait until they are told. Output is written through ``data``, so that autograd does not see it,
just as it does not see what native code writes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from asynccoll.backends.api import Promise, Transfer
from asynccoll.memory.aliasing import may_overlap
from asynccoll.testing.delivery import CLOSED, Delivery

__all__ = ["Call", "Wire", "fill", "spoil"]

#: Twice this many of the rounds that all ranks have called are kept.
_KEPT_ROUNDS = 64
#: Reads draw from generators with numbers below those of ranks: the latencies of messages stay the same.
_READS_AT_ONCE = -1
_ABORTED = "the communicator was aborted"


@dataclass
class Call:
    """One rank's part of one round."""

    index: int
    signature: tuple[object, ...]
    sent: list[torch.Tensor]
    filled: list[torch.Tensor]
    needs: frozenset[int]
    #: how many bytes it sends to each of the others
    size_bytes: float
    finish: Callable[[list[list[torch.Tensor]]], object]
    promise: Promise = field(default_factory=Transfer)
    at: float = -math.inf  # when all that it needs will have arrived
    came: set[int] = field(default_factory=set)
    _read: list[torch.Tensor] | None = None

    @property
    def in_place(self) -> bool:
        """Whether its output shares memory with its input."""
        return any(may_overlap(x, y) for x in self.sent for y in self.filled)

    def read(self) -> list[torch.Tensor]:
        """Return the input, read at the first call; output that shares its memory is garbage from then on."""
        if self._read is None:
            self._read = [x.data.clone() for x in self.sent]
            if self.in_place:  # else it was spoiled in ``post``
                self.spoil()
        return self._read

    def spoil(self) -> None:
        for x in self.filled:
            spoil(x)

    def settle(self, error: BaseException | None = None) -> None:
        self.promise.settle(error)


def fill(x: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` to ``x`` as native code does: element by element, in memory order."""
    x.data.view(-1).copy_(value.reshape(-1))


def _told(signature: tuple[object, ...]) -> str:
    name, *rest = signature
    return f"{name}({', '.join(map(str, rest))})"


@torch.inference_mode()
def spoil(x: torch.Tensor) -> None:
    x.data.fill_(math.nan if x.is_floating_point() or x.is_complex() else 1 if x.dtype is torch.bool else 85)


class Wire:
    """One communicator, shared by all of its members."""

    def __init__(self, delivery: Delivery, name: str, ranks: tuple[int, ...]) -> None:
        self._delivery = delivery
        self.name = name
        self.ranks = ranks
        self.closed: set[int] = set()  # the indices of members that have left
        self._made = [0] * len(ranks)
        self._rounds: defaultdict[int, dict[int, Call]] = defaultdict(dict)

    def post(self, call: Call) -> Promise:
        """Make one rank's call, and schedule the end of the calls that now get all that they need."""
        rank = self.ranks[call.index]
        self._delivery.called(rank, f"{_told(call.signature)} on {self.name}")
        number = self._made[call.index]
        self._made[call.index] += 1
        self._rounds.pop(min(self._made) - 2 * _KEPT_ROUNDS, None)
        peers = self._rounds[number]
        peers[call.index] = call
        if not call.in_place:
            call.spoil()
        elif self._delivery.scheduler.chance(_READS_AT_ONCE - rank).random() < 0.5:
            call.read()
        other = next((one for one in peers.values() if one.signature != call.signature), None)
        if other is not None:
            self._mismatch(call, other, peers)
            return call.promise
        for one in peers.values():
            self._messages(one, call)
            if one is not call:
                self._messages(call, one)
        self._maybe_over(call, peers)
        for one in list(peers.values()):
            self._maybe_over(one, peers)
        if call.index in self.closed or self._cut_off(call):
            self._lose(call)
        return call.promise

    def _messages(self, to: Call, of: Call) -> None:
        if of.index in to.needs and of.index not in to.came:
            to.came.add(of.index)
            ranks = self.ranks[of.index], self.ranks[to.index]
            now = self._delivery.scheduler.now
            to.at = max(to.at, now if of is to else self._delivery.arrival(of.size_bytes, *ranks))

    def _maybe_over(self, call: Call, peers: dict[int, Call]) -> None:
        if call.came == call.needs and call.at < math.inf:
            at, call.at = max(call.at, self._delivery.scheduler.now), math.inf
            self._delivery.at(self.ranks[call.index], at, partial(self._end, call, peers))

    def _end(self, call: Call, peers: dict[int, Call]) -> None:
        if call.promise.done():
            return
        rows = [peers[index].read() if index in call.needs else [] for index in range(len(self.ranks))]
        call.read()
        if call.index in self.closed:
            call.settle(RuntimeError(_ABORTED))
            return
        self._delivery.scheduler.point()
        try:
            call.finish(rows)
        except RuntimeError as error:  # parts of an all_to_all whose sizes are not what the others expect
            self._fail_all(peers, f"{call.signature} on {self.name}: {error}")
            return
        self._delivery.scheduler.point()
        call.settle()

    def _mismatch(self, call: Call, other: Call, peers: dict[int, Call]) -> None:
        mine, theirs = self.ranks[call.index], self.ranks[other.index]
        self._fail_all(
            peers,
            f"on {self.name}, rank {mine} calls {call.signature} where rank {theirs} calls {other.signature}",
        )

    def _fail_all(self, peers: dict[int, Call], text: str) -> None:
        """Fail calls that a real transport would have mixed up, or aborted."""
        self._delivery.mismatches.append(text)
        for one in peers.values():
            self._fail(one, f"calls do not match: {text}")

    def _fail(self, call: Call, text: str) -> None:
        rank = self.ranks[call.index]
        at = self._delivery.arrival(0, rank, rank)
        self._delivery.at(rank, at, partial(call.settle, RuntimeError(text)))

    # Loss

    def _cut_off(self, call: Call) -> bool:
        """Whether a neighbor in the ring has left, or a rank whose data the call needs."""
        size = len(self.ranks)
        around = {(call.index + 1) % size, (call.index - 1) % size} if len(call.needs) == size else call.needs
        return not self.closed.isdisjoint(around - {call.index})

    def _lose(self, call: Call) -> None:
        if call.came != call.needs:  # else all that it needs will arrive
            self._fail(call, CLOSED)

    def close(self, index: int) -> None:
        """Have a member leave, and fail the calls that wait for it."""
        if index in self.closed:
            return
        self.closed.add(index)
        for peers in list(self._rounds.values()):
            for call in list(peers.values()):
                if call.promise.done():
                    continue
                if call.index == index:
                    fail = partial(call.settle, RuntimeError(_ABORTED))
                    self._delivery.at(self.ranks[index], self._delivery.scheduler.now, fail)
                elif self._cut_off(call):
                    self._lose(call)

"""One simulated communicator: calls in rounds, each over on a rank once all that it needs has come there.

What a rank will fill holds garbage until the call is over, and what it sends is read at the last moment at
which it may be. If it fills the memory that it sends, both cannot be: by chance it is read at once, and then
garbage, or late. A lost rank fails the calls of its neighbours, as the ring of gloo does; the others wait
until somebody tells them. What is written goes by ``data``, which autograd does not see, as it does not see
native code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from asynccoll.backends.api import Promise
from asynccoll.memory.aliasing import may_overlap
from asynccoll.testing.delivery import CLOSED, Delivery

__all__ = ["Call", "Wire", "fill", "spoil"]

#: How many rounds behind the last rank are remembered.
_KEPT_ROUNDS = 64
#: Below the numbers of ranks: a chance of its own, so that those of a rank's messages stay what they are.
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
    #: how many of them it sends to each of the others
    size_bytes: float
    finish: Callable[[list[list[torch.Tensor]]], object]
    promise: Promise = field(default_factory=Promise)
    at: float = -math.inf  # when all that it needs will have come
    came: set[int] = field(default_factory=set)
    _read: list[torch.Tensor] | None = None

    @property
    def in_place(self) -> bool:
        """Whether it fills memory that it sends."""
        return any(may_overlap(x, y) for x in self.sent for y in self.filled)

    def read(self) -> list[torch.Tensor]:
        """What it sends; its own memory is garbage from then on, where it will be filled."""
        if self._read is None:
            self._read = [x.data.clone() for x in self.sent]
            if self.in_place:  # else it was spoiled at the call
                self.spoil()
        return self._read

    def spoil(self) -> None:
        for x in self.filled:
            spoil(x)

    def settle(self, error: BaseException | None = None) -> None:
        self.promise.settle(error)


def fill(x: torch.Tensor, value: torch.Tensor) -> None:
    """As native code does: element by element, in the order of memory."""
    x.data.view(-1).copy_(value.reshape(-1))


def _told(signature: tuple[object, ...]) -> str:
    name, *rest = signature
    return f"{name}({', '.join(map(str, rest))})"


@torch.inference_mode()
def spoil(x: torch.Tensor) -> None:
    x.data.fill_(math.nan if x.is_floating_point() or x.is_complex() else 1 if x.dtype is torch.bool else 85)


class Wire:
    """One communicator, seen by all of its members."""

    def __init__(self, delivery: Delivery, name: str, ranks: tuple[int, ...]) -> None:
        self._delivery = delivery
        self.name = name
        self.ranks = ranks
        self.closed: set[int] = set()  # indices of those who have left it
        self._made = [0] * len(ranks)
        self._rounds: defaultdict[int, dict[int, Call]] = defaultdict(dict)

    def post(self, call: Call) -> Promise:
        """One rank calls; what this was the last message for comes to its end in time."""
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
        except (
            RuntimeError
        ) as error:  # parts of an all_to_all that have not the sizes which the others expect
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
        """Where a real transport would have mixed them up, or aborted."""
        self._delivery.mismatches.append(text)
        for one in peers.values():
            self._fail(one, f"calls do not match: {text}")

    def _fail(self, call: Call, text: str) -> None:
        rank = self.ranks[call.index]
        at = self._delivery.arrival(0, rank, rank)
        self._delivery.at(rank, at, partial(call.settle, RuntimeError(text)))

    # Loss

    def _cut_off(self, call: Call) -> bool:
        """Whether a neighbour in the ring, or one who is needed to say something, has left."""
        size = len(self.ranks)
        around = {(call.index + 1) % size, (call.index - 1) % size} if len(call.needs) == size else call.needs
        return not self.closed.isdisjoint(around - {call.index})

    def _lose(self, call: Call) -> None:
        if call.came != call.needs:  # else it has all it needs
            self._fail(call, CLOSED)

    def close(self, index: int) -> None:
        """A member leaves it: those who wait for it hear so."""
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

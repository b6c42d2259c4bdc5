"""Messages between two simulated ranks: each takes its time, and those of one tag are matched in order.

A send completes once its message is received, whatever its size: a library may buffer small messages, but
need not.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import torch

from asynccoll.backends.api import Promise, unlike
from asynccoll.errors import PeerRefusedError
from asynccoll.testing.delivery import CLOSED, Delivery
from asynccoll.testing.rounds import fill

__all__ = ["Letter", "Mailbox"]


class Letter(NamedTuple):
    """A message of rank ``src`` that arrives at ``at``; ``sent`` is settled once it is received."""

    at: float
    content: torch.Tensor | str
    sent: Promise
    src: int


class Mailbox:
    """The messages of one pair of ranks and one tag, in order."""

    def __init__(self) -> None:
        self.letters: deque[Letter] = deque()
        self.readers: deque[tuple[torch.Tensor, Promise, int]] = deque()
        self.closed: bool = False

    def match(self, delivery: Delivery) -> None:
        while self.letters and self.readers:
            letter = self.letters.popleft()
            into, promise, rank = self.readers.popleft()
            at = max(letter.at, delivery.scheduler.now)
            delivery.at(rank, at, partial(_take, letter.content, into, promise))
            delivery.at(letter.src, at, letter.sent.settle)
        if self.closed:
            self.close(delivery)

    def close(self, delivery: Delivery) -> None:
        self.closed = True
        # The letters stay: what a sender has sent is received before the connection ends.
        waiting = [(letter.sent, letter.src) for letter in self.letters if not letter.sent.done()]
        waiting += [(promise, rank) for _, promise, rank in self.readers]
        self.readers.clear()
        for promise, rank in waiting:
            delivery.at(rank, delivery.arrival(0, rank, rank), partial(promise.settle, RuntimeError(CLOSED)))


def _take(letter: torch.Tensor | str, into: torch.Tensor, promise: Promise) -> None:
    if isinstance(letter, str):
        promise.settle(PeerRefusedError(letter))
    elif letter.dtype is not into.dtype or letter.numel() != into.numel():
        promise.settle(unlike(letter.numel(), letter.dtype, into.numel(), into.dtype))
    else:
        fill(into, letter)
        promise.settle()

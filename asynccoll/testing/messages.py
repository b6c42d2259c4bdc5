"""Messages between two simulated ranks: each comes in its time, and those of one tag in order."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from asynccoll.backends.api import Promise, dtype_name
from asynccoll.errors import CollectiveMismatchError, PeerRefusedError
from asynccoll.testing.delivery import CLOSED, Delivery
from asynccoll.testing.rounds import fill

__all__ = ["Mailbox"]


class Mailbox:
    """Messages of one pair and tag, in order."""

    def __init__(self) -> None:
        self.letters: deque[tuple[float, torch.Tensor | str]] = deque()
        self.readers: deque[tuple[torch.Tensor | None, Promise, int]] = deque()
        self.closed: bool = False

    def match(self, delivery: Delivery) -> None:
        while self.letters and self.readers:
            at, letter = self.letters.popleft()
            into, promise, rank = self.readers.popleft()
            delivery.at(rank, max(at, delivery.scheduler.now), partial(_take, letter, into, promise))
        if self.closed:
            self.close(delivery)

    def close(self, delivery: Delivery) -> None:
        self.closed = True
        while self.readers:
            _, promise, rank = self.readers.popleft()
            delivery.at(rank, delivery.arrival(0, rank, rank), partial(promise.settle, RuntimeError(CLOSED)))


def _take(letter: torch.Tensor | str, into: torch.Tensor | None, promise: Promise) -> None:
    if into is None:
        promise.settle()
    elif isinstance(letter, str):
        promise.settle(PeerRefusedError(letter))
    elif letter.dtype is not into.dtype or letter.numel() != into.numel():
        promise.settle(
            CollectiveMismatchError(
                f"recv: the sender's message has {letter.numel()} elements of {dtype_name(letter.dtype)}, "
                f"but `like` has {into.numel()} of {dtype_name(into.dtype)}"
            )
        )
    else:
        fill(into, letter)
        promise.settle()

"""Messages from a rank to itself, which no transport carries."""

from __future__ import annotations

import threading
from collections import deque

import torch

from asynccoll.completion import READY, Completion, Promise

__all__ = ["Mailbox"]


class Mailbox:
    """Buffered: a send is done at once, a receive when its message has been sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[int, deque[torch.Tensor]] = {}
        self._wanted: dict[int, deque[tuple[torch.Tensor, Promise]]] = {}

    def send(self, x: torch.Tensor, tag: int) -> Completion:
        with self._lock:
            waiting = self._wanted.get(tag)
            if not waiting:
                self._sent.setdefault(tag, deque()).append(x.clone())
                return READY
            into, promise = waiting.popleft()
        into.copy_(x)
        promise.settle()
        return READY

    def recv(self, x: torch.Tensor, tag: int) -> Completion:
        with self._lock:
            sent = self._sent.get(tag)
            if not sent:
                promise = Promise()
                self._wanted.setdefault(tag, deque()).append((x, promise))
                return promise
            message = sent.popleft()
        x.copy_(message)
        return READY

"""Point-to-point messages over gloo: a native group per pair of ranks.

gloo's sends and receives have no future, and a bounded wait on one destroys its group; so they have
groups of their own, which only the two ranks open, and threads that wait without a bound. gloo also
fills half a tensor, or aborts the process, when the two sides differ in size; so a small header goes
ahead of each message, and what does not fit is taken in and refused by name.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from asynccoll.backends.waiters import Waiters
from asynccoll.completion import Completion, Promise
from asynccoll.errors import CollectiveMismatchError
from asynccoll.spec import dtype_name

__all__ = ["Channels"]

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class Channels:
    """The messages of one communicator. ``open_pair(peer)`` makes the native group of two."""

    def __init__(self, open_pair: Callable[[int], Any], rank: int) -> None:
        self._open_pair = open_pair
        self._rank = rank
        self._pairs: dict[int, Any] = {}
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._waiters = Waiters("asynccoll-p2p")

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        def deliver(pair: Any, peer: int) -> None:
            header = torch.tensor([x.numel(), _DTYPES.index(x.dtype)])
            works = [pair.send([header], peer, tag), pair.send([x], peer, tag)]
            for work in works:
                work.wait()

        return self._start(("send", dst, tag), dst, deliver)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        def take(pair: Any, peer: int) -> None:
            header = torch.empty(2, dtype=torch.int64)
            pair.recv([header], peer, tag).wait()
            count, code = header.tolist()
            fits = count == x.numel() and _DTYPES[code] is x.dtype
            into = x if fits else torch.empty(count, dtype=_DTYPES[code])
            pair.recv([into], peer, tag).wait()
            if not fits:
                raise CollectiveMismatchError(
                    f"recv with tag {tag}: the sender's message has {count} elements of "
                    f"{dtype_name(into.dtype)}, but `like` has {x.numel()} of {dtype_name(x.dtype)} (the "
                    "message was taken and dropped; the channel is still usable)"
                )

        return self._start(("recv", src, tag), src, take)

    def _start(
        self, stream: tuple[str, int, int], peer: int, exchange: Callable[[Any, int], None]
    ) -> Completion:
        promise = Promise()
        index = int(peer > self._rank)  # in the pair, the lower rank is 0

        def run() -> None:
            try:
                # Opening a pair waits for the peer, so it is done here, not in the caller.
                exchange(self._pair(peer), index)
            except BaseException as error:
                promise.settle(error)
            else:
                promise.settle()

        self._waiters.submit(stream, run)
        return promise

    def _pair(self, peer: int) -> Any:
        with self._opening[peer]:  # both directions may want it first, and it must be opened once
            pair = self._pairs.get(peer)
            if pair is None:
                pair = self._pairs[peer] = self._open_pair(peer)
        return pair

    def natives(self) -> list[Any]:
        """The native groups that are open."""
        return list(self._pairs.values())

    def close(self) -> None:
        self._pairs.clear()

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

from asynccoll.backends.api import Completion, InProgress, Promise, Waiters, unlike
from asynccoll.backends.c10d.completion import NEVER
from asynccoll.errors import PeerRefusedError

__all__ = ["Channels"]

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_CLOSE_SECONDS = 1.0
#: In place of a dtype: the body is the reason why there is no message.
_REFUSED = -1


class Channels:
    """The messages of one communicator. ``open_pair(peer)`` makes the native group of two."""

    def __init__(
        self, open_pair: Callable[[int], object], rank: int, await_others: Callable[[], object]
    ) -> None:
        """``await_others`` returns when the peers have opened all that was opened here."""
        self._open_pair = open_pair
        self._await_others = await_others
        self._rank = rank
        self._pairs: dict[int, object] = {}
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._waiters = Waiters("asynccoll-p2p")
        self._exchanging = InProgress()

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        def deliver(pair: object, peer: int) -> None:
            _post(pair, peer, tag, _DTYPES.index(x.dtype), x)

        return self._start(("send", dst, tag), dst, deliver)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        def take(pair: object, peer: int) -> None:
            got = _take(pair, peer, tag, x)
            if got is not x:
                raise unlike(got.numel(), got.dtype, x.numel(), x.dtype)

        return self._start(("recv", src, tag), src, take)

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """In place of a send: tell the receiver so."""

        def tell(pair: object, index: int) -> None:
            _post(pair, index, tag, _REFUSED, torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8))

        self._start(("send", dst, tag), dst, tell)

    def _start(
        self, stream: tuple[str, int, int], peer: int, exchange: Callable[[object, int], None]
    ) -> Completion:
        promise = Promise()
        index = int(peer > self._rank)  # in the pair, the lower rank is 0

        def run() -> None:
            try:
                # Opening a pair waits for the peer, so it is done here, not in the caller.
                with self._exchanging:
                    exchange(self._pair(peer), index)
            except BaseException as error:
                promise.settle(error)
            else:
                promise.settle()

        self._waiters.submit(stream, run)
        return promise

    def _pair(self, peer: int) -> object:
        with self._opening[peer]:  # both directions may want it first, and it must be opened once
            pair = self._pairs.get(peer)
            if pair is None:
                pair = self._pairs[peer] = self._open_pair(peer)
        return pair

    def natives(self) -> list[object]:
        """The native groups that are open."""
        return list(self._pairs.values())

    def close(self, give_up: Callable[[object], None], *, aborted: bool) -> None:
        """Let go of the native groups; ``give_up`` ends what is in flight there, of which nobody knows.

        ``aborted``: all of them have been, and no peer is waited for.
        """
        # A refusal that its peer never asked for: the interpreter must not end while a thread waits in gloo.
        if not self._exchanging.wait(0.0):
            for pair in self.natives():
                give_up(pair)
            self._exchanging.wait(_CLOSE_SECONDS)
        elif not aborted:
            self._await_others()
        self._pairs.clear()


def _post(pair: Any, peer: int, tag: int, code: int, body: torch.Tensor) -> None:
    """Send a header and ``body``; over when the peer has taken both."""
    works = [pair.send([x], peer, tag) for x in (torch.tensor([body.numel(), code], device="cpu"), body)]
    for work in works:
        work.wait(NEVER)


def _take(pair: Any, peer: int, tag: int, into: torch.Tensor) -> torch.Tensor:
    """The next message: in ``into`` if it fits there, else in a tensor of its own."""
    header = torch.empty(2, dtype=torch.int64, device="cpu")
    pair.recv([header], peer, tag).wait(NEVER)
    count, code = header.tolist()
    dtype = torch.uint8 if code == _REFUSED else _DTYPES[code]
    fits = code != _REFUSED and count == into.numel() and dtype is into.dtype
    body = into if fits else torch.empty(count, dtype=dtype, device="cpu")
    pair.recv([body], peer, tag).wait(NEVER)
    if code == _REFUSED:
        raise PeerRefusedError(bytes(body.numpy()).decode())
    return body

"""Point-to-point messages over gloo: a native group for each pair of ranks.

gloo's sends and receives have no future, and a wait on one that times out destroys its group. So messages use
groups that only the two ranks open, and threads that wait without a bound. If the two sides differ in size,
gloo fills half a tensor or aborts the process. So a small header is sent before each message, and a message
that does not fit is received into other memory, and refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from asynccoll.backends.api import Completion, InProgress, Transfer, Waiters, encoded, locks, unlike
from asynccoll.backends.c10d.completion import NEVER
from asynccoll.errors import PeerRefusedError

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_CLOSE_SECONDS = 1.0
#: Instead of a dtype's code: there is no message, and the body is the reason, as text.
_REFUSED = -1


class Channels:
    """The messages of one communicator. ``open_pair(peer)`` makes the native group with the rank ``peer``."""

    def __init__(
        self, open_pair: Callable[[int], object], rank: int, await_others: Callable[[], object]
    ) -> None:
        """``await_others`` returns once the peers have opened all pairs that were opened here."""
        self._open_pair = open_pair
        self._await_others = await_others
        self._rank = rank
        self._pairs: dict[int, object] = {}
        self._opening: defaultdict[int, locks.Lock] = defaultdict(locks.Lock)
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
        """Tell the receiver, instead of a send, that there is no message, and why."""

        def tell(pair: object, index: int) -> None:
            _post(pair, index, tag, _REFUSED, torch.frombuffer(bytearray(encoded(why)), dtype=torch.uint8))

        self._start(("send", dst, tag), dst, tell)

    def _start(
        self, stream: tuple[str, int, int], peer: int, exchange: Callable[[object, int], None]
    ) -> Completion:
        index = int(peer > self._rank)  # the peer's index in the pair, in which the lower rank is 0

        def run() -> None:
            # Opening a pair waits for the peer, so it is done in this thread, not in the caller's.
            with self._exchanging:
                exchange(self._pair(peer), index)

        # gloo may write to the memory of a receive until its thread is back.
        return self._waiters.run(stream, run, Transfer())

    def _pair(self, peer: int) -> object:
        with self._opening[peer]:  # a send and a receive may both be the first, but a pair is opened once
            pair = self._pairs.get(peer)
            if pair is None:
                pair = self._pairs[peer] = self._open_pair(peer)
        return pair

    def natives(self) -> list[object]:
        """Return the native groups that are open."""
        return list(self._pairs.values())

    def close(self, give_up: Callable[[object], None], *, aborted: bool) -> None:
        """Release the native groups. ``give_up`` ends what is still in flight on one.

        ``aborted`` says that all groups were aborted, so that peers are not waited for.
        """
        # A refusal that its peer never receives may still be in flight. The interpreter must not end while a
        # thread waits in gloo.
        if not self._exchanging.wait(0.0):
            for pair in self.natives():
                give_up(pair)
            self._exchanging.wait(_CLOSE_SECONDS)
        elif not aborted:
            self._await_others()
        self._pairs.clear()


def _post(pair: Any, peer: int, tag: int, code: int, body: torch.Tensor) -> None:
    """Send a header and ``body``; return when the peer has taken both."""
    works = [pair.send([x], peer, tag) for x in (torch.tensor([body.numel(), code], device="cpu"), body)]
    for work in works:
        work.wait(NEVER)


def _take(pair: Any, peer: int, tag: int, into: torch.Tensor) -> torch.Tensor:
    """Receive the next message into ``into`` if it fits there, else into a new tensor; return that tensor."""
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

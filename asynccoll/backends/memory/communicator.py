"""A lane's communicator in shared memory: each call becomes an exchange that the lane's engine carries.

Ranks that call different things find out before anything is used: each call has a checksum of what it is,
which stands beside its data, and a line of text, for the error.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from asynccoll.backends.api import Completion, ReduceOp, shown
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.exchange import Call
from asynccoll.backends.memory.exchanges import (
    AllGather,
    AllReduce,
    AllReduceByParts,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from asynccoll.backends.memory.layout import ABORTED, CLOSED, TEXT_BYTES
from asynccoll.backends.memory.messages import Messages
from asynccoll.errors import AbortedError, CollectiveError, PeerLostError

__all__ = ["MemoryCommunicator"]

#: How many kinds of calls are remembered.
_MOST_KINDS = 4096
_GIVEN_UP = "its lane was given up"


class MemoryCommunicator:
    """One of a lane, in one epoch, and its messages in all of them."""

    parts = None

    def __init__(
        self, engine: Engine, messages: Messages, disagreed: Callable[[int, CollectiveError], object]
    ) -> None:
        """``disagreed`` is told of a place in the order that parts share, where ranks differ about one."""
        self._engine = engine
        self._messages = messages
        self._disagreed = disagreed
        self._size = engine.region.size
        #: the checksum of a kind of call from one line, and what is shown of it
        self._kinds: dict[tuple[object, ...], tuple[int, bytes]] = {}
        self._what: Hashable = None
        self._spot: Any = None
        self._place, self._part, self._shares = 0, 1, False

    def announce(self, what: Hashable, spot: object, place: int, part: int, shares: bool) -> None:
        """What is issued next is a part of this call (``Communicator``)."""
        self._what, self._spot = what, spot
        self._place, self._part, self._shares = place, part, shares

    def _call(self, *native: object) -> Call:
        """What has to be the same on all ranks: of the call that its user made, and of this native one."""
        spot = self._spot
        key = (native, self._what, spot and id(spot.code), spot and spot.instruction)
        known, line = self._kinds.get(key) or self._learn(key)
        # Which of a rank's calls it is counts, too: of one in many parts another rank may have made fewer. So
        # may a child task that had the lane before, after which places go on far above (2**40 at a time).
        place = self._place
        which = place * 0x9E3779B1 + (place >> 32) * 0x27D4EB2F + self._part * 0x85EBCA6B
        checksum = (known + which) & 0xFFFFFFFF
        return checksum, line, self._place, self._shares, self._disagreed

    def _learn(self, key: tuple[object, ...]) -> tuple[int, bytes]:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        native, what = key[:2]
        text = shown(what) or shown(native)
        found = self._kinds[key] = zlib.crc32(f"{text} {shown(native)}".encode()), _line(text, self._spot)
        return found

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self.all_reduce_into(x, x, op)

    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        call = self._call("all_reduce", op, x.dtype, x.numel())
        by_parts = self._size > 2 and x.nbytes > self._engine.region.layout.by_parts_bytes
        made = AllReduceByParts if by_parts else AllReduce
        sent = _flat(x)
        return self._engine.start(made(self._engine, call, sent if out is x else _flat(out), sent, op))

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        call = self._call("reduce", op, x.dtype, x.numel(), "dst", dst)
        return self._engine.start(Reduce(self._engine, call, _flat(x), dst, op))

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        call = self._call("broadcast", x.dtype, x.numel(), "src", src)
        return self._engine.start(Broadcast(self._engine, call, _flat(x), src))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        call = self._call("all_gather", x.dtype, x.numel())
        return self._engine.start(AllGather(self._engine, call, _flat(out), _flat(x)))

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        call = self._call("gather", x.dtype, x.numel(), "dst", dst)
        rows = None if out is None else [_flat(row) for row in out]
        return self._engine.start(Gather(self._engine, call, rows, _flat(x)))

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        call = self._call("scatter", out.dtype, out.numel(), "src", src)
        parts = None if x is None else [_flat(part) for part in x]
        return self._engine.start(Scatter(self._engine, call, _flat(out), parts, src))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        call = self._call("reduce_scatter", op, x.dtype, x.numel())
        return self._engine.start(ReduceScatter(self._engine, call, _flat(out), _flat(x), op))

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Completion:
        row = x.shape[1:].numel()
        call = self._call("all_to_all", x.dtype, "rows of", row)
        splits = out_splits, in_splits
        if row != 1:
            splits = [row * size for size in out_splits], [row * size for size in in_splits]
        return self._engine.start(AllToAll(self._engine, call, _flat(out), _flat(x), splits))

    def barrier(self) -> Completion:
        return self._engine.start(Barrier(self._engine, self._call("barrier")))

    # Messages between two

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        return self._messages.send(_flat(x), dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        return self._messages.recv(_flat(x), src, tag)

    def refuse(self, dst: int, tag: int, why: str) -> None:
        self._messages.refuse(dst, tag, why)

    # Ends

    def retire(self) -> bool:
        self._engine.stop(ABORTED, PeerLostError(_GIVEN_UP))
        return True

    def inherit(self, previous: MemoryCommunicator) -> None:
        self._messages = previous._messages
        self._messages.follow(self._engine)

    def close(self) -> None:
        self._leave(CLOSED, AbortedError("its lane was closed"))
        self._messages.join()

    def abort(self) -> None:
        self._leave(ABORTED, PeerLostError(_GIVEN_UP))

    def _leave(self, state: int, why: CollectiveError) -> None:
        self._engine.stop(state, why)
        self._messages.stop(state, why)


def _line(text: str, spot: Any) -> bytes:
    """What is shown of a call: ``text``, and the line that made it."""
    line = (text if spot is None else f"{text} at {spot.place}").encode()
    if len(line) >= TEXT_BYTES and spot is not None:  # the line that called it is what helps most
        where = f"... at {spot.place}".encode()
        line = line[: TEXT_BYTES - 1 - len(where)] + where
    return line


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The contiguous ``x`` in one dimension, which any thread may read and fill, in whatever mode it is.

    One made in inference mode may be filled in that mode alone, and with one that requires gradients a thread
    that records would put the slots of the region into a graph.
    """
    if x.is_inference():
        x = _in_no_mode(x)
    elif x.requires_grad:
        x = x.detach()
    return x if x.dim() == 1 else x.view(-1)


def _in_no_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        if not x.numel():
            return torch.empty(0, dtype=x.dtype, device="cpu")
        memory: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        memory.kept = x
        return torch.frombuffer(memory, dtype=x.dtype)

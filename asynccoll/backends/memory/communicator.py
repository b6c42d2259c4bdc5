"""A lane's communicator in shared memory: each call becomes an exchange that the lane's engine carries out.

Ranks that make different calls detect it before any data is used: with its data each call writes a checksum
of what the call is, and a line of text for the error.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from asynccoll.backends.api import Completion, ReduceOp, at_line, encoded, shown, unseen
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

#: For how many kinds of calls the checksum and the text are kept.
_MOST_KINDS = 4096
_GIVEN_UP = "its lane was given up"


class MemoryCommunicator:
    """The communicator of a lane.

    If a refused call leaves the ranks out of step, the lane begins a new *epoch* and opens another
    communicator, which takes over (``inherit``) the messages of this one.
    """

    parts = None

    def __init__(
        self, engine: Engine, messages: Messages, disagreed: Callable[[int, CollectiveError], object]
    ) -> None:
        """``disagreed`` is called if ranks differ about one of several parts of a call.

        It is given the call's place (its number in the lane's order) and the error.
        """
        self._engine = engine
        self._messages = messages
        self._disagreed = disagreed
        self._size = engine.region.size
        #: for each kind of call and the line that makes it: its checksum, the text that shows it, and the
        #: code of that line, kept alive so that no other code gets its ``id``
        self._kinds: dict[tuple[object, ...], tuple[int, bytes, object]] = {}
        self._announced: tuple[Hashable, Any, int, int, bool] = None, None, 0, 1, False

    def announce(self, what: Hashable, spot: object, place: int, part: int, shares: bool) -> None:
        """Say which call the next native calls belong to (see ``Communicator``)."""
        self._announced = what, spot, place, part, shares

    def _call(self, *native: object) -> Call:
        """Describe a native call. The checksum covers what must be the same on all ranks.

        That is what the user called, this native call, and which of the lane's calls and parts it is.
        """
        what, spot, place, part, shares = self._announced
        key = (native, what, spot and id(spot.code), spot and spot.instruction)
        known, line, _ = self._kinds.get(key) or self._learn(key, spot)
        # Ranks may make equal calls at different places: one may have made fewer parts of the previous call,
        # or fewer calls in the previous child task on the lane (each child's places begin 2**40 higher).
        checksum = (known + hash((place, part))) & 0xFFFFFFFF  # of ints, so the same in every process
        return checksum, line, place, shares, self._disagreed

    def _learn(self, key: tuple[object, ...], spot: Any) -> tuple[int, bytes, object]:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        native, what = key[:2]
        text = shown(what) or shown(native)
        line = at_line(what or native, spot and spot.place, TEXT_BYTES - 1)
        checksum = zlib.crc32(encoded(f"{text} {shown(native)}"))
        found = self._kinds[key] = checksum, line, spot and spot.code
        return found

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self.all_reduce_into(x, x, op)

    @unseen
    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        call = self._call("all_reduce", op, x.dtype, x.numel())
        by_parts = self._size > 2 and x.nbytes > self._engine.region.layout.by_parts_bytes
        made = AllReduceByParts if by_parts else AllReduce
        sent = _flat(x)
        return self._engine.start(made(self._engine, call, sent if out is x else _flat(out), sent, op))

    @unseen
    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        call = self._call("reduce", op, x.dtype, x.numel(), "dst", dst)
        return self._engine.start(Reduce(self._engine, call, _flat(x), dst, op))

    @unseen
    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        call = self._call("broadcast", x.dtype, x.numel(), "src", src)
        return self._engine.start(Broadcast(self._engine, call, _flat(x), src))

    @unseen
    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        call = self._call("all_gather", x.dtype, x.numel())
        return self._engine.start(AllGather(self._engine, call, _flat(out), _flat(x)))

    @unseen
    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        call = self._call("gather", x.dtype, x.numel(), "dst", dst)
        rows = None if out is None else [_flat(row) for row in out]
        return self._engine.start(Gather(self._engine, call, rows, _flat(x)))

    @unseen
    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        call = self._call("scatter", out.dtype, out.numel(), "src", src)
        parts = None if x is None else [_flat(part) for part in x]
        return self._engine.start(Scatter(self._engine, call, _flat(out), parts, src))

    @unseen
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        call = self._call("reduce_scatter", op, x.dtype, x.numel())
        return self._engine.start(ReduceScatter(self._engine, call, _flat(out), _flat(x), op))

    @unseen
    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Completion:
        row = x.shape[1:].numel()
        call = self._call("all_to_all", x.dtype, "rows of", row)
        splits = out_splits, in_splits
        if row != 1:
            splits = [row * size for size in out_splits], [row * size for size in in_splits]
        return self._engine.start(AllToAll(self._engine, call, _flat(out), _flat(x), splits, row))

    @unseen  # it may post what earlier calls have yet to put
    def barrier(self) -> Completion:
        return self._engine.start(Barrier(self._engine, self._call("barrier")))

    # Point-to-point messages

    @unseen
    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        return self._messages.send(_flat(x), dst, tag)

    @unseen
    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        return self._messages.recv(_flat(x), src, tag)

    @unseen
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
        try:
            self._engine.stop(state, why)
        finally:  # after Ctrl-C, too: others wait for this rank's messages
            self._messages.stop(state, why)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the contiguous ``x`` in one dimension, for threads in any mode to read and fill.

    A tensor made in inference mode can only be filled in that mode. With a tensor that requires gradients, a
    thread whose autograd records would put the slots of the region into a graph.
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

"""A lane's communicator in shared memory: each call becomes an exchange that the lane's engine carries.

Ranks that call different things find out before anything is used: each call has a checksum of what it is, which stands
beside its data, and a line of text, for the error.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from asynccoll.backends.api import Communicator, Completion, ReduceOp, dtype_name
from asynccoll.backends.memory.engine import Engine
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
from asynccoll.backends.memory.layout import ABORTED, CLOSED
from asynccoll.errors import AbortedError, PeerLostError

__all__ = ["MemoryCommunicator"]

#: From so many bytes on more than two ranks reduce a part each: below, one more round costs more than it saves.
_BY_PARTS_BYTES = 64 << 10
#: How many kinds of calls are remembered.
_MOST_KINDS = 4096


class MemoryCommunicator:
    """One of a lane, in one epoch. ``rest`` carries messages between two."""

    parts = None

    def __init__(self, engine: Engine, rest: Communicator) -> None:
        self._engine = engine
        self._rest = rest
        self._size = engine.region.size
        self._kinds: dict[tuple[Any, ...], tuple[int, bytes]] = {}

    def _kind(self, *what: Any) -> tuple[int, bytes]:
        """The checksum and the text of a call: what has to be the same on all ranks."""
        found = self._kinds.get(what)
        if found is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            text = " ".join(_shown(one) for one in what).encode()
            found = self._kinds[what] = (zlib.crc32(text), text)
        return found

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self.all_reduce_into(x, x, op)

    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        checksum, text = self._kind("all_reduce", op, x.dtype, x.numel())
        by_parts = self._size > 2 and x.nbytes > _BY_PARTS_BYTES
        made = AllReduceByParts if by_parts else AllReduce
        return self._engine.start(made(self._engine, checksum, text, _flat(out), _flat(x), op))

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        checksum, text = self._kind("reduce", op, x.dtype, x.numel(), "dst", dst)
        return self._engine.start(Reduce(self._engine, checksum, text, _flat(x), dst, op))

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        checksum, text = self._kind("broadcast", x.dtype, x.numel(), "src", src)
        return self._engine.start(Broadcast(self._engine, checksum, text, _flat(x), src))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        checksum, text = self._kind("all_gather", x.dtype, x.numel())
        return self._engine.start(AllGather(self._engine, checksum, text, _flat(out), _flat(x)))

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        checksum, text = self._kind("gather", x.dtype, x.numel(), "dst", dst)
        rows = None if out is None else [_flat(row) for row in out]
        return self._engine.start(Gather(self._engine, checksum, text, rows, _flat(x)))

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        checksum, text = self._kind("scatter", out.dtype, out.numel(), "src", src)
        parts = None if x is None else [_flat(part) for part in x]
        return self._engine.start(Scatter(self._engine, checksum, text, _flat(out), parts, src))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        checksum, text = self._kind("reduce_scatter", op, x.dtype, x.numel())
        return self._engine.start(ReduceScatter(self._engine, checksum, text, _flat(out), _flat(x), op))

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Completion:
        row = x.shape[1:].numel()
        checksum, text = self._kind("all_to_all", x.dtype, "rows of", row)
        splits = out_splits, in_splits
        if row != 1:
            splits = [row * size for size in out_splits], [row * size for size in in_splits]
        return self._engine.start(AllToAll(self._engine, checksum, text, _flat(out), _flat(x), splits))

    def barrier(self) -> Completion:
        return self._engine.start(Barrier(self._engine, *self._kind("barrier")))

    # Messages between two

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        return self._rest.send(x, dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        return self._rest.recv(x, src, tag)

    def refuse(self, role: str, peer: int, tag: int, why: str) -> None:
        self._rest.refuse(role, peer, tag, why)

    # Ends

    def retire(self) -> bool:
        self._leave(ABORTED)
        return True

    def inherit(self, previous: MemoryCommunicator) -> None:
        self._rest.inherit(previous._rest)

    def close(self) -> None:
        self._leave(CLOSED)
        self._rest.close()

    def abort(self) -> None:
        self._leave(ABORTED)
        self._rest.abort()

    def _leave(self, state: int) -> None:
        why = (
            AbortedError("its lane was closed") if state == CLOSED else PeerLostError("its lane was given up")
        )
        self._engine.stop(state, why)


def _shown(what: Any) -> str:
    if isinstance(what, torch.dtype):
        return dtype_name(what)
    return str(getattr(what, "value", what))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The contiguous ``x`` in one dimension; of one made in inference mode memory that any thread may fill."""
    if x.is_inference() and x.numel():
        x = _in_no_mode(x)
    return x if x.dim() == 1 else x.view(-1)


def _in_no_mode(x: torch.Tensor) -> torch.Tensor:
    memory: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    memory.kept = x
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=x.dtype)

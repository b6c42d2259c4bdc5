"""One MPI communicator as the core sees it: nonblocking calls on the tensors' own memory.

Data is moved as bytes, whatever the dtype, and reduced in MPI's predefined types. If a count is above the
library's limit, movement uses datatypes of many bytes, and a reduction is split into several calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI

from asynccoll.backends.api import Completion, Ready, ReduceOp, may_overlap, uncast
from asynccoll.backends.mpi.completion import (
    LARGE_BYTES,
    Common,
    Guarded,
    LeftToThread,
    Many,
    MpiCompletion,
    never_ending,
    typed,
)
from asynccoll.backends.mpi.library import Library
from asynccoll.backends.mpi.messages import Received, header, refusal, room
from asynccoll.backends.mpi.types import (
    BYTE,
    OPS,
    TYPES,
    address,
    bytes_of,
    memory,
    offsets,
    run_of_bytes,
    spread,
)
from asynccoll.errors import AbortedError, InvalidArgumentError

IN_PLACE: object = MPI.IN_PLACE
NO_BYTES: object = (None, 0, BYTE)


class MpiCommunicator:
    """The communicator of one group, lane and epoch."""

    def __init__(self, native: Any, library: Library, rank: int, size: int, burst: int) -> None:
        self.native = native
        self._library = library
        self._gate = library.gate
        self._limit = library.limit
        self._on_device = library.cuda_aware
        self._guarded = self._on_device or library.gate is not None
        self._large = 0 if self._guarded else LARGE_BYTES
        self._iallreduce = native.Iallreduce
        self._common = Common(burst)
        self._rank = rank
        self._size = size
        self._messages = native  # the same in every epoch of a lane
        self._half_matched = False

    def _start(
        self, call: Callable[..., Any], arguments: Sequence[object], x: torch.Tensor, keep: object = None
    ) -> Completion:
        """Issue ``call``, and keep the memory that it works on until it is over."""
        return self._begin([partial(call, *arguments)], None, x, keep)

    def _start_parts(
        self,
        call: Callable[..., object],
        parts: Sequence[Sequence[object]],
        x: torch.Tensor,
        keep: object = None,
    ) -> Completion:
        """Issue ``call`` once for each of ``parts``, in an order that is the same on every rank."""
        return self._begin([partial(call, *arguments) for arguments in parts], Many(), x, keep)

    def _begin(
        self, calls: Sequence[partial[Any]], request: Many | None, x: torch.Tensor, keep: object
    ) -> Completion:
        """Issue ``calls``: a single one, or those that ``request`` combines."""
        common, size = self._common, x.nbytes
        if common.abandoned:
            return Ready(AbortedError("its lane was given up"))
        common.make_left()
        if self._on_device:
            _settle_stream(x)
        buffers = x, keep, calls
        try:
            if size >= LARGE_BYTES and common.overlapped and not self._guarded:
                return LeftToThread(request or Many(), calls, buffers, size, common)
            return MpiCompletion(self._made(calls, request), buffers, size, common)
        except MPI.Exception as error:
            return Ready(typed(error))
        except BaseException:  # Ctrl-C: MPI may already use the memory
            never_ending.append(buffers)
            raise

    def _made(self, calls: Sequence[partial[Any]], request: Many | None) -> object:
        make = calls[0] if request is None else partial(request.make, calls)
        if self._gate is None:
            return make()
        with self._gate:
            return Guarded(make(), self._gate)

    # Arithmetic

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        count, size = x.numel(), x.nbytes
        common = self._common
        if size >= self._large or count > self._limit or common.left is not None or common.abandoned:
            return self._all_reduce(x, x, op)
        # The same as ``_all_reduce``, inlined: this is the call whose latency matters most.
        try:
            request = self._iallreduce(
                IN_PLACE, (address(x.data_ptr(), size), count, TYPES[x.dtype]), OPS[op]
            )
            return MpiCompletion(request, x, size, common)
        except MPI.Exception as error:
            return Ready(typed(error))
        except BaseException:  # as in ``_begin``
            never_ending.append(x)
            raise

    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        if may_overlap(x, out):
            x = out if x.data_ptr() == out.data_ptr() else x.clone()
        return self._all_reduce(out, x, op)

    def _all_reduce(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        if x.numel() <= self._limit:
            read = IN_PLACE if x is out else _typed(x)
            return self._start(self._iallreduce, (read, _typed(out), OPS[op]), x, out)
        into = self._pieces(out)
        pieces = [IN_PLACE] * len(into) if x is out else self._pieces(x)
        parts = [(source, target, OPS[op]) for source, target in zip(pieces, into, strict=True)]
        return self._start_parts(self._iallreduce, parts, x, out)

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        call = self.native.Ireduce
        parts: list[tuple[object, ...]] = [
            (IN_PLACE, part, OPS[op], dst) if dst == self._rank else (part, None, OPS[op], dst)
            for part in self._pieces(x)
        ]
        if len(parts) > 1:
            return self._start_parts(call, parts, x)
        return self._start(call, parts[0], x)

    def _pieces(self, x: torch.Tensor) -> list[tuple[object, int, object]]:
        """Return the arguments that reduce ``x``: one for each call, of at most ``_limit`` elements."""
        flat, limit = x.view(-1), self._limit
        return [_typed(flat[start : start + limit]) for start in range(0, max(1, x.numel()), limit)]

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        if may_overlap(x, out):
            x = x.clone()  # MPI refuses memory that is both read and written
        if x.numel() > self._limit:
            return self._reduce_scatter_by_reduces(out, x, op)
        kind, count = TYPES[x.dtype], out.numel()
        arguments = ((memory(x), count, kind), (memory(out), count, kind), OPS[op])
        return self._start(self.native.Ireduce_scatter_block, arguments, x, out)

    def _reduce_scatter_by_reduces(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        """Reduce each rank's part to that rank, in separate calls, so that no count is above the limit."""
        calls: list[tuple[object, ...]] = []
        for rank, row in enumerate(x.view(self._size, -1)):
            pieces = self._pieces(row)
            into = self._pieces(out) if rank == self._rank else [None] * len(pieces)
            calls += [(part, target, OPS[op], rank) for part, target in zip(pieces, into, strict=True)]
        return self._start_parts(self.native.Ireduce, calls, x, out)

    # Movement

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        return self._start(self.native.Ibcast, (bytes_of(x, self._limit), src), x)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        sent: Any = bytes_of(x, self._limit)
        received = (memory(out), *sent[1:])
        if may_overlap(x, out):
            in_place = x.data_ptr() == out.data_ptr() + self._rank * x.nbytes
            sent = IN_PLACE if in_place else bytes_of(x := x.clone(), self._limit)
        return self._start(self.native.Iallgather, (sent, received), x, out)

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        received = self._parts(out) if out is not None else None
        arguments = (bytes_of(x, self._limit), received, dst)
        return self._start(self.native.Igatherv, arguments, x, out)

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        if x is not None and spread(x) > self._limit:
            x = list(uncast(torch.cat, [part.view(-1) for part in x]).view(len(x), -1))
        sent = self._parts(x) if x is not None else None
        arguments = (sent, bytes_of(out, self._limit), src)
        return self._start(self.native.Iscatterv, arguments, out, x)

    def _parts(self, parts: Sequence[torch.Tensor]) -> tuple[object, list[int], list[int], object]:
        """Return the argument for one tensor per rank, all of one size, anywhere in memory."""
        base, places = offsets(parts)
        size, span = parts[0].nbytes, spread(parts)
        if span <= self._limit:
            return address(base, span), [size] * len(parts), places, BYTE
        # These are rows of one tensor (others would have been copied into one), so count in rows.
        rows = [place // size for place in places]
        return address(base, span), [1] * len(parts), rows, run_of_bytes(size, self._limit)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        if may_overlap(x, out):
            x = x.clone()
        row = x.nbytes // x.shape[0] if x.shape[0] else out.nbytes // max(1, out.shape[0])
        arguments = (self._rows(x, in_splits, row), self._rows(out, out_splits, row))
        return self._start(self.native.Ialltoallv, arguments, x, out)

    def _rows(
        self, x: torch.Tensor, splits: Sequence[int], row: int
    ) -> tuple[object, list[int], list[int], object]:
        """Return the argument for a tensor split along dim 0, for a vector call."""
        unit, kind = row, BYTE
        if x.nbytes > self._limit:
            unit, kind = 1, run_of_bytes(row, self._limit)
        counts = [count * unit for count in splits]
        places = [0, *accumulate(counts)][: len(counts)]
        return memory(x), counts, places, kind

    # Messages

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        said, where = header(x), (dst, self._tag(tag))
        ahead = partial(self._messages.Isend, (said, BYTE), *where)
        # Synchronous: complete only once the receiver has taken it, as our callers are promised.
        body = partial(self._messages.Issend, bytes_of(x, self._limit), *where)
        return self._begin([ahead, body], Many(), x, said)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        said, where = room(), (src, self._tag(tag))
        ahead = partial(self._messages.Irecv, (said, BYTE), *where)
        body = partial(self._messages.Irecv, bytes_of(x, self._limit), *where)
        return self._begin([ahead, body], Received(said, x), x, said)

    def _tag(self, tag: int) -> int:
        highest = self._library.highest_tag
        if tag > highest:
            raise InvalidArgumentError(f"tag {tag} is above {highest}, the highest that this MPI library has")
        return tag

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Send, instead of a message, a header with the reason and an empty body."""
        said, where = refusal(why), (dst, self._tag(tag))
        ahead = partial(self._messages.Isend, (said, BYTE), *where)
        body = partial(self._messages.Isend, NO_BYTES, *where)
        self._begin([ahead, body], Many(), _NOTHING, said)
        self._half_matched = True  # nobody may ever receive it

    def barrier(self) -> Completion:
        return self._start(self.native.Ibarrier, (), _NOTHING)

    # The end

    def retire(self) -> bool:
        """Return False: MPI cannot cancel a collective, so what it needs is kept until the end."""
        return False

    def inherit(self, previous: MpiCommunicator) -> None:
        previous._common.make_left()  # it may be a message, which precedes those of this epoch
        self._messages = previous._messages

    def half_matched(self) -> None:
        """Note that what some rank has sent on it may not have been received.

        Once all ranks have freed a communicator, MPI gives its context to another one, which would receive
        that: as the data of other calls, even on the root of a broadcast.
        """
        self._half_matched = True

    def close(self) -> None:
        """Free it, unless something on it will never end: MPI then keeps it until the job ends."""
        if not (self._common.abandoned or self._half_matched or MPI.Is_finalized()):
            with contextlib.suppress(MPI.Exception):
                self._library.call(self.native.Free)

    def abort(self) -> None:
        """Give up what is in flight. MPI cannot cancel a collective, so its memory is never freed."""
        self._common.abandoned = True


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _typed(x: torch.Tensor) -> tuple[object, int, object]:
    """Return the argument for a contiguous tensor that is reduced."""
    return address(x.data_ptr(), x.nbytes), x.numel(), TYPES[x.dtype]


def _settle_stream(x: torch.Tensor) -> None:
    """Wait until what fills a device tensor has run: MPI knows nothing of streams."""
    if x.device.type == "cuda":
        torch.cuda.current_stream(x.device).synchronize()

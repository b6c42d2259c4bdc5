"""One order of calls on one process set: Horovod's asynchronous calls on the tensors' own memory.

Horovod matches the ranks' calls by name, so an order costs nothing but names, made of the lane, the epoch and
the number of the call. Reductions take their names from a ring in turn: Horovod remembers what it has
negotiated under a name, so a reduction like the last one of that name needs no second negotiation.

A collective that Horovod lacks is made of one that it has. A reduction to one rank is an all_reduce; gather
and scatter are exchanges (all_to_all) in which the other ranks receive, or send, nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import mpi_lib

from asynccoll.backends.api import (
    READY,
    Completion,
    Promise,
    ReduceOp,
    Waiters,
    as_called,
    as_matrix,
    uncast,
)
from asynccoll.backends.horovod.completion import Common, HorovodCompletion
from asynccoll.errors import AbortedError, CollectiveMismatchError, UnsupportedOpError

#: How many names reductions have. In a loop of n calls, each call finds its own predecessor under its name if
#: n divides this number: so it is one with many divisors. Horovod remembers 1024
#: (``HOROVOD_CACHE_CAPACITY``).
RING = 120

#: The thread on which calls enter Horovod, in the order in which they were made (``completion``).
_ENTRANCE = Waiters("asynccoll-horovod")

_OPS = {
    ReduceOp.SUM: mpi_ops.Sum,
    ReduceOp.AVG: mpi_ops.Average,
    ReduceOp.MIN: mpi_ops.Min,
    ReduceOp.MAX: mpi_ops.Max,
    ReduceOp.PRODUCT: mpi_ops.Product,
    ReduceOp.ADASUM: mpi_ops.Adasum,
}
#: What Horovod calls a tensor of each dtype, in the names of its functions.
_TENSORS = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
}


def _functions(kind: str) -> dict[torch.dtype, Callable[..., int]]:
    """Return the native functions of one kind, by dtype.

    Horovod's public functions allocate most results themselves, and look the native function up each time.
    """
    names = {dtype: f"horovod_torch_{kind}_async_torch_{name}Tensor" for dtype, name in _TENSORS.items()}
    return {dtype: getattr(mpi_lib, name) for dtype, name in names.items() if hasattr(mpi_lib, name)}


_ALL_REDUCE = _functions("allreduce")
_ALL_GATHER = _functions("allgather")
_ALL_TO_ALL = _functions("alltoall")
_BROADCAST = _functions("broadcast")
_REDUCE_SCATTER = _functions("reducescatter")


class Rounds:
    """How often the ranks of a process set have joined, after which all its orders count anew.

    Also whether they may join again. They may not if some ranks have issued a call that others never will:
    Horovod keeps it, and while some ranks have joined, takes the ranks that issued it for all the others. A
    rank that has not issued it then ends with a segmentation fault.
    """

    __slots__ = ("given_up", "joined")

    def __init__(self) -> None:
        self.joined: int = 0
        self.given_up: bool = False


class HorovodCommunicator:
    """The calls on one process set whose names begin with ``prefix``."""

    def __init__(
        self, process_set: Any, ranks: Sequence[int], rank: int, prefix: str, rounds: Rounds
    ) -> None:
        self._set: int = process_set.process_set_id
        self._ranks = ranks
        self._rank = rank
        self._prefix = prefix
        self._rounds = rounds
        self._round = rounds.joined
        self._calls = 0
        self._reductions = 0
        #: the latest reduction under each name
        self._ring: list[Completion] = [READY] * RING
        self._common = Common()

    def _name(self) -> bytes:
        """Return the next name. It is the same on every rank, since all issue in the same order."""
        if self._round != self._rounds.joined:
            self._begin_round()
        self._calls += 1
        return f"{self._prefix}.{self._round}.{self._calls}".encode()

    def _begin_round(self) -> None:
        self._round = self._rounds.joined
        self._calls = self._reductions = 0
        self._ring = [READY] * RING

    def _start(
        self, call: Callable[..., int], *arguments: object, finish: Callable[[], object] | None = None
    ) -> Completion:
        """Issue ``call``, and keep the memory that it works on until it is over."""
        # The thread that finds it done may be in another mode, in which it cannot write to inference tensors.
        issued = HorovodCompletion(call, arguments, self._common, finish and as_called(finish))
        _ENTRANCE.submit("", issued.enter)
        return issued

    # Arithmetic

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        if op is ReduceOp.ADASUM:
            self._check_adasum()
        place, name = self._next_reduction()
        call = (_ALL_REDUCE[x.dtype], x, x, 1, name, _OPS[op], 1.0, 1.0, self._set)
        before = self._ring[place]
        now = self._start(*call) if before.done() else self._start_after(before, *call)
        self._ring[place] = now
        return now

    def _next_reduction(self) -> tuple[int, bytes]:
        """Return the next place in the ring, and its name."""
        if self._round != self._rounds.joined:
            self._begin_round()
        self._reductions += 1
        place = self._reductions % RING
        return place, f"{self._prefix}.{self._round}.{place}".encode()

    def _start_after(self, before: Completion, call: Callable[..., int], *arguments: object) -> Completion:
        """Issue ``call`` when ``before`` is over: no two calls in flight may have the same name."""
        promise = Promise()

        def begin() -> None:
            if self._common.abandoned:
                promise.settle(AbortedError("given up before its turn"))
                return
            promise.follow(self._start(call, *arguments))
            promise.sent = tuple  # else each call would keep all earlier ones alive

        promise.sent = lambda: (before,)  # once ``before`` is over, this call writes to its memory
        before.add_callback(begin)
        return promise

    def _check_adasum(self) -> None:
        size = len(self._ranks)
        if size & (size - 1) or self._set:
            raise UnsupportedOpError(
                f"adasum runs over the world, of a number of ranks that is a power of two; got {size} ranks"
                f"{' of a group' if self._set else ''}"
            )

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        return self.all_reduce(x, op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        rows, part = x.view(len(self._ranks), -1), out.view(1, -1)
        call = _REDUCE_SCATTER[x.dtype]
        return self._start(call, rows, part, self._name(), _OPS[op], self._set, 1.0, 1.0)

    # Movement

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        x = x.view(-1)  # Horovod compares shapes, and a receiver need not know the one that is sent
        return self._start(_BROADCAST[x.dtype], x, x, self._ranks[src], self._name(), self._set)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        # As rows, so that a part of another size is refused on all ranks.
        rows = out.view(len(self._ranks), -1)
        return self._start(_ALL_GATHER[x.dtype], x.view(1, -1), rows, self._name(), self._set)

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        size = len(self._ranks)
        given = [1 if index == dst else 0 for index in range(size)]
        flat = x.reshape(1, -1)
        if out is None:
            return self._exchange(flat.new_empty(0, flat.shape[1]), flat, [0] * size, given)
        rows = flat.new_empty(size, flat.shape[1])

        def deliver() -> None:
            for part, row in zip(out, rows, strict=True):
                part.view(-1).copy_(row)

        return self._exchange(rows, flat, [1] * size, given, deliver)

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        size = len(self._ranks)
        taken = [1 if index == src else 0 for index in range(size)]
        into = out.view(1, -1)
        if x is None:
            return self._exchange(into, into[:0], taken, [0] * size)
        return self._exchange(into, uncast(torch.stack, [part.reshape(-1) for part in x]), taken, [1] * size)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        return self._exchange(as_matrix(out), as_matrix(x), out_splits, in_splits)

    def _exchange(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        deliver: Callable[[], object] | None = None,
    ) -> Completion:
        """Send rows of ``x`` to every rank; fail if a rank sends more or fewer rows than expected here."""
        counts = torch.tensor(in_splits, dtype=torch.int32, device="cpu")
        received = torch.empty(len(self._ranks), dtype=torch.int32, device="cpu")
        expected = list(out_splits)
        into = out if _may_grow(out) else torch.empty_like(out)

        def finish() -> None:
            if received.tolist() != expected:
                raise CollectiveMismatchError(
                    f"rank {self._ranks[self._rank]} expected {expected} rows from each rank and got "
                    f"{received.tolist()}; pass splits that agree on every rank (check='full' tells more)"
                )
            if into is not out:
                out.copy_(into)
            if deliver is not None:
                deliver()

        call, name = _ALL_TO_ALL[x.dtype], self._name()
        return self._start(call, x, counts, into, received, name, self._set, finish=finish)

    def join(self, last: torch.Tensor) -> Completion:
        """Contribute zeros to the other ranks' reductions until all ranks have joined.

        ``last`` is filled with the rank that joined last. From here on calls are counted anew, since ranks
        that joined early have made fewer.

        Raises:
            UnsupportedOpError: on every rank, if a call was refused by some rank and issued by others.
        """
        if self._rounds.given_up:
            raise UnsupportedOpError(
                "join() after a call that a rank has refused: Horovod still has what the others issued for "
                "it, and would end these ranks with a segmentation fault. Agree on the number of steps "
                "instead (an all_reduce with op='min'), or restart the ranks"
            )
        self._rounds.joined += 1
        return self._start(mpi_lib.horovod_torch_join, last, -1)

    # What Horovod lacks

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        raise UnsupportedOpError("Horovod has no messages between two ranks")  # dispatch refuses first

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        raise UnsupportedOpError("Horovod has no messages between two ranks")

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Do nothing: Horovod has no messages between two ranks."""

    def barrier(self) -> Completion:
        return self.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), ReduceOp.SUM)

    # The end

    def retire(self) -> bool:
        """Return False: Horovod cannot cancel an operation, so what it needs is kept until the end."""
        self._rounds.given_up = True
        return False

    def inherit(self, previous: HorovodCommunicator) -> None:
        """Do nothing: Horovod has no messages between two ranks."""

    def close(self) -> None:
        """Do nothing: there are only names, and so nothing to release."""

    def abort(self) -> None:
        """Give up what is in flight. Horovod cannot cancel an operation, and keeps its memory."""
        self._common.abandoned = True


def _may_grow(out: torch.Tensor) -> bool:
    """Whether Horovod can resize ``out`` to the rows that arrive, and overwrites nothing else if it does."""
    storage = out.untyped_storage()
    return storage.resizable() and storage.nbytes() == out.nbytes

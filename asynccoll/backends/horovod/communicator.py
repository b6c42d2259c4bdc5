"""One order of one process set as the core sees it: Horovod's asynchronous calls on the tensors' own memory.

Ranks meet by name, so an order costs nothing but a name: lane, epoch and a number that counts the
calls. Reductions take their names in turn from a ring: what Horovod has once negotiated under a name it
remembers, and a reduction like the one before needs no second negotiation.

What Horovod has no call for is one that it has: a reduction to one rank is one to all, gathering to one
and scattering are exchanges in which the others have nothing to give or to get.
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

__all__ = ["HorovodCommunicator", "Rounds"]

#: Names of reductions. Loops of two, three, ... calls find under a name what they sent under it before:
#: hence a number that many divide. Horovod remembers 1024 (``HOROVOD_CACHE_CAPACITY``).
RING = 120

#: The thread on which calls enter, in the order in which they were made (``completion``).
_ENTRANCE = Waiters("asynccoll-horovod")

_OPS = {
    ReduceOp.SUM: mpi_ops.Sum,
    ReduceOp.AVG: mpi_ops.Average,
    ReduceOp.MIN: mpi_ops.Min,
    ReduceOp.MAX: mpi_ops.Max,
    ReduceOp.PRODUCT: mpi_ops.Product,
    ReduceOp.ADASUM: mpi_ops.Adasum,
}
#: Horovod's name of a tensor, in the names of its functions.
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
    """The calls of one kind by dtype, as Horovod's own Python calls them.

    Its public functions make memory of their own for most results, and look this up each time.
    """
    names = {dtype: f"horovod_torch_{kind}_async_torch_{name}Tensor" for dtype, name in _TENSORS.items()}
    return {dtype: getattr(mpi_lib, name) for dtype, name in names.items() if hasattr(mpi_lib, name)}


_ALL_REDUCE = _functions("allreduce")
_ALL_GATHER = _functions("allgather")
_ALL_TO_ALL = _functions("alltoall")
_BROADCAST = _functions("broadcast")
_REDUCE_SCATTER = _functions("reducescatter")


class Rounds:
    """How often the ranks of a process set have joined: from then on all its orders count anew.

    And whether they may join again: Horovod keeps what some ranks have issued and others never will. Of the
    ranks that have not joined it would take these for all that it waits for, and end them with a segmentation
    fault where they have not issued it.
    """

    __slots__ = ("given_up", "joined")

    def __init__(self) -> None:
        self.joined: int = 0
        self.given_up: bool = False


class HorovodCommunicator:
    """The names that begin with ``prefix``, in one process set."""

    def __init__(
        self, process_set: Any, ranks: Sequence[int], rank: int, prefix: str, rounds: Rounds
    ) -> None:
        self.process_set = process_set
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
        """The next name: the same on every rank, for they issue in the same order."""
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
        """Issue ``call``; what it works on is kept until it is over."""
        # The thread that finds it done may be in other modes, which cannot write to inference tensors.
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
        """Whose turn it is in the ring, and its name."""
        if self._round != self._rounds.joined:
            self._begin_round()
        self._reductions += 1
        place = self._reductions % RING
        return place, f"{self._prefix}.{self._round}.{place}".encode()

    def _start_after(self, before: Completion, call: Callable[..., int], *arguments: object) -> Completion:
        """Issue ``call`` when ``before`` is over: no two in flight may have one name."""
        promise = Promise()

        def begin() -> None:
            if self._common.abandoned:
                promise.settle(AbortedError("given up before its turn"))
                return
            promise.follow(self._start(call, *arguments))
            promise.sent = tuple  # else each call would keep all before it

        promise.sent = lambda: (before,)  # once that is over, this one writes to its memory
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
        x = x.view(-1)  # Horovod compares shapes, and who receives need not know that of the wire
        return self._start(_BROADCAST[x.dtype], x, x, self._ranks[src], self._name(), self._set)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        # As rows: then a rank whose part has another size is refused on all of them.
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
        """Rows of ``x`` to everybody; who sends more or fewer than is expected is found out here."""
        counts = torch.tensor(in_splits, dtype=torch.int32, device="cpu")
        received = torch.empty(len(self._ranks), dtype=torch.int32, device="cpu")
        expected = list(out_splits)
        into = out if _may_grow(out) else torch.empty_like(out)

        def finish() -> None:
            if received.tolist() != expected:
                raise CollectiveMismatchError(
                    f"rank {self._ranks[self._rank]} expected {expected} rows of each rank and got "
                    f"{received.tolist()}; pass splits that agree on every rank (check='full' tells more)"
                )
            if into is not out:
                out.copy_(into)
            if deliver is not None:
                deliver()

        call, name = _ALL_TO_ALL[x.dtype], self._name()
        return self._start(call, x, counts, into, received, name, self._set, finish=finish)

    def join(self, last: torch.Tensor) -> Completion:
        """Take part with zeros in whatever the others still reduce, until all have joined.

        ``last`` is filled with the rank that came last. From here on the calls are counted anew, as those
        who joined early have made fewer.

        Raises:
            UnsupportedOpError: on every rank, where a call was refused by some rank and issued by others.
        """
        if self._rounds.given_up:
            raise UnsupportedOpError(
                "join() after a call that a rank has refused: Horovod still has what the others issued of "
                "it, and would end these ranks with a segmentation fault. Agree on the number of steps "
                "instead (the min of it, by all_reduce), or restart the ranks"
            )
        self._rounds.joined += 1
        return self._start(mpi_lib.horovod_torch_join, last, -1)

    # What there is not

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        raise UnsupportedOpError("Horovod has no messages between two ranks")  # dispatch refuses first

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        raise UnsupportedOpError("Horovod has no messages between two ranks")

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Horovod has no messages between two ranks."""

    def barrier(self) -> Completion:
        return self.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), ReduceOp.SUM)

    # The end

    def retire(self) -> bool:
        """Horovod cannot take an operation back: what it needs is kept to the end."""
        self._rounds.given_up = True
        return False

    def inherit(self, previous: HorovodCommunicator) -> None:
        """Horovod has no messages between two ranks."""

    def close(self) -> None:
        """Nothing to release: a name is all there is."""

    def abort(self) -> None:
        """Give up what is in flight: Horovod cannot take an operation back, and keeps its memory."""
        self._common.abandoned = True


def _may_grow(out: torch.Tensor) -> bool:
    """Whether Horovod, which resizes it to the rows that arrive, overwrites nothing else, and can."""
    storage = out.untyped_storage()
    return storage.resizable() and storage.nbytes() == out.nbytes

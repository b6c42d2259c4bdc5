"""One order of one process set as the core sees it: Horovod's asynchronous calls on the tensors' own memory.

Ranks meet by name, so an order costs nothing but a name: lane, epoch and a number that counts the
calls. What Horovod has no call for is one that it has: a reduction to one rank is one to all, gathering
to one and scattering are exchanges in which the others have nothing to give or to get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from asynccoll.backends.horovod_completion import Common, HorovodCompletion, typed
from asynccoll.completion import AllOf, Completion, Promise, Ready
from asynccoll.errors import CollectiveMismatchError, UnsupportedOpError
from asynccoll.spec import ReduceOp

__all__ = ["HorovodCommunicator", "Rounds"]

_OPS = {
    ReduceOp.SUM: mpi_ops.Sum,
    ReduceOp.AVG: mpi_ops.Average,
    ReduceOp.MIN: mpi_ops.Min,
    ReduceOp.MAX: mpi_ops.Max,
    ReduceOp.PRODUCT: mpi_ops.Product,
    ReduceOp.ADASUM: mpi_ops.Adasum,
}


class Rounds:
    """How often the ranks of a process set have joined: from then on all its orders count anew."""

    __slots__ = ("joined",)

    def __init__(self) -> None:
        self.joined = 0


class HorovodCommunicator:
    """The names that begin with ``prefix``, in one process set."""

    def __init__(
        self, process_set: Any, ranks: Sequence[int], rank: int, prefix: str, rounds: Rounds
    ) -> None:
        self.process_set = process_set
        self._ranks = ranks
        self._rank = rank
        self._prefix = prefix
        self._rounds = rounds
        self._round = rounds.joined
        self._calls = 0
        self._common = Common()

    def _name(self) -> str:
        """The next name: the same on every rank, for they issue in the same order."""
        if self._round != self._rounds.joined:
            self._round, self._calls = self._rounds.joined, 0
        self._calls += 1
        return f"{self._prefix}.{self._round}.{self._calls}"

    def _start(
        self,
        call: Callable[..., int],
        *arguments: Any,
        keep: object = None,
        finish: Callable[[Any], object] | None = None,
    ) -> Completion:
        """Issue ``call``; what it works on is kept until it is over."""
        try:
            handle = call(*arguments)
        except RuntimeError as error:  # HorovodInternalError is one
            return Ready(typed(error))
        return HorovodCompletion(handle, (arguments, keep), self._common, finish)

    # Arithmetic

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        if x.layout is not torch.strided:
            return self._all_reduce_sparse(x)
        return self._start(mpi_ops._allreduce_async, x, x, self._name(), _OPS[op], 1.0, 1.0, self.process_set)

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        return self.all_reduce(x, op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        rows = x.view(len(self._ranks), -1)
        return self._start(
            mpi_ops._reducescatter_async,
            rows,
            out.view(1, -1),
            self._name(),
            _OPS[op],
            self.process_set,
            1.0,
            1.0,
        )

    def _all_reduce_sparse(self, x: torch.Tensor) -> Completion:
        """The sum of sparse tensors: everybody's indices and values, which may differ in number."""
        found: dict[str, torch.Tensor] = {}
        parts = {"indices": x._indices().t().contiguous(), "values": x._values().contiguous()}
        name = self._name()
        both = AllOf([self._gather_rows(part, f"{name}.{key}", found, key) for key, part in parts.items()])
        promise = Promise()

        def settle() -> None:
            error = both.error()
            if error is None:
                total = torch.sparse_coo_tensor(found["indices"].t(), found["values"], x.shape)
                x.copy_(total.coalesce())
            promise.settle(error)

        both.add_callback(settle)
        return promise

    def _gather_rows(
        self, part: torch.Tensor, name: str, found: dict[str, torch.Tensor], key: str
    ) -> Completion:
        def finish(result: torch.Tensor) -> None:
            found[key] = result

        return self._start(
            mpi_ops._allgather_async, part, part.new_empty(0), name, self.process_set, finish=finish
        )

    # Movement

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        x = x.view(-1)  # Horovod compares shapes, and who receives need not know that of the wire
        return self._start(mpi_ops._broadcast_async, x, x, self._ranks[src], self._name(), self.process_set)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        # As rows: then a rank whose part has another size is refused on all of them.
        rows = out.view(len(self._ranks), -1)
        return self._start(mpi_ops._allgather_async, x.view(1, -1), rows, self._name(), self.process_set)

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        size = len(self._ranks)
        given = [1 if index == dst else 0 for index in range(size)]
        flat = x.reshape(1, -1)
        if out is None:
            return self._exchange(flat[:0], flat, [0] * size, given)
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
        return self._exchange(into, torch.stack([part.reshape(-1) for part in x]), taken, [1] * size)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        return self._exchange(out, x, out_splits, in_splits)

    def _exchange(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        deliver: Callable[[], object] | None = None,
    ) -> Completion:
        """Rows of ``x`` to everybody; who sends more or fewer than is expected is found out here."""
        counts = torch.tensor(in_splits, dtype=torch.int32)
        received = torch.empty(len(self._ranks), dtype=torch.int32)
        expected = list(out_splits)

        def finish(_: Any) -> None:
            if received.tolist() != expected:
                raise CollectiveMismatchError(
                    f"rank {self._ranks[self._rank]} expected {expected} rows of each rank and got "
                    f"{received.tolist()}; pass splits that agree on every rank (check='full' tells more)"
                )
            if deliver is not None:
                deliver()

        return self._start(
            mpi_ops._alltoall_async,
            x,
            counts,
            out,
            received,
            self._name(),
            self.process_set,
            finish=finish,
        )

    def join(self, last: torch.Tensor) -> Completion:
        """Take part with zeros in whatever the others still reduce, until all have joined.

        ``last`` is filled with the rank that came last. From here on the calls are counted anew, as those
        who joined early have made fewer.
        """

        def start() -> int:
            handle: int = mpi_ops.mpi_lib.horovod_torch_join(last, -1)
            mpi_ops._handle_map[handle] = (None, last)
            return handle

        self._rounds.joined += 1
        return self._start(start)

    # What there is not

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        raise UnsupportedOpError("Horovod has no messages between two ranks")  # dispatch refuses first

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        raise UnsupportedOpError("Horovod has no messages between two ranks")

    def barrier(self) -> Completion:
        return self._start(
            mpi_ops._allreduce_async,
            (one := torch.zeros(1)),
            one,
            self._name(),
            mpi_ops.Sum,
            1.0,
            1.0,
            self.process_set,
        )

    # The end

    def close(self) -> None:
        """Nothing to release: a name is all there is."""

    def abort(self) -> None:
        """Give up what is in flight: Horovod cannot take an operation back, and keeps its memory."""
        self._common.abandoned = True

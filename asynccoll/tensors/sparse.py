"""The sum of sparse tensors of any dtype: all ranks gather all tensors, and each computes the sum.

Shapes: three ranks with ``(5,)`` and 2, 0 and 1 values get ``(5,)`` with up to 3 values.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from asynccoll.order.lane import Lane
from asynccoll.plan.spec import Plan
from asynccoll.tensors.common import Call
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion


def sum_sparse(lane: Lane, plan: Plan, x: torch.Tensor) -> Call:
    """Return the call that sums every rank's sparse ``x``."""
    mine = x.detach().coalesce()
    gathered = _Gathered(mine, lane.group.size)
    values = mine.values()
    detail = f"sum sparse_dim={mine.sparse_dim()}"  # index lengths may differ between tensors of one shape
    return Call(plan, None, values, gathered.total, shape=x.shape, detail=detail, program=gathered.program)


class _Gathered:
    """The indices and values of all ranks. Their number differs, so all are padded to the longest."""

    def __init__(self, mine: torch.Tensor, size: int) -> None:
        self._mine = mine
        self._size = size

    def program(self, communicator: Communicator) -> Generator[Completion, None, Completion]:
        """Gather the counts, then the indices and values."""
        mine, size = self._mine, self._size
        self._counts = torch.empty(size, dtype=torch.int64, device=mine.device)
        here = torch.full((1,), mine.values().shape[0], dtype=torch.int64, device=mine.device)
        yield communicator.all_gather(self._counts, here)
        longest = int(self._counts.max())
        indices, values = mine.indices().t(), mine.values()
        self._indices = indices.new_empty((size, longest, indices.shape[1]))
        self._values = values.new_empty((size, longest, *values.shape[1:]))
        yield communicator.all_gather(self._indices.view(-1), _padded(indices, longest))
        sent = _padded(values, longest).view(torch.uint8)  # as bytes, for any dtype
        return communicator.all_gather(self._values.view(-1).view(torch.uint8), sent)

    def total(self) -> torch.Tensor:
        """Return the sum, in rank order, so that every rank has the same bits."""
        counts = self._counts.tolist()
        indices = torch.cat([row[:count] for row, count in zip(self._indices, counts, strict=True)])
        values = torch.cat([row[:count] for row, count in zip(self._values, counts, strict=True)])
        shape, device = self._mine.shape, self._mine.device
        whole = torch.sparse_coo_tensor(indices.t(), values, shape, device=device, check_invariants=False)
        return whole.coalesce()


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``rows`` padded with zeros to ``count`` rows, and flattened."""
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]].copy_(rows)
    return padded.view(-1)

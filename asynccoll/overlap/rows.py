"""The gradients of embeddings with ``sparse=True``: rows, which differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.overlap.buckets import Gradients
from asynccoll.waiting.work import Work

__all__ = ["SparseGradient", "check_dense", "sparse_of"]


def sparse_of(model: object) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module whose gradients will be sparse, as far as torch's layers tell."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            yield module.weight


def check_dense(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse ``parameters`` of ``model`` whose gradients will be sparse, and cannot be cut into parts."""
    sparse = {id(x) for x in sparse_of(model)}
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) in sparse:
            raise InvalidArgumentError(
                f"a parameter of shape {list(parameter.shape)} is of an embedding with sparse=True, whose "
                "gradients cannot be divided among the ranks: build it with sparse=False, or leave it out "
                "here and reduce its gradients with ac.overlap_gradients"
            )


class SparseGradient(Gradients):
    """The gradient of one such parameter, reduced separately: the sum has the rows of all ranks.

    If the parameter is also used densely, its gradient is dense, and stays dense; it is sent as rows.

    A rank that has a gradient sends one more row, past the end of the table. So the others also learn of a
    gradient without rows (from an empty batch): an optimizer with momentum makes an update for it, but none
    for a parameter without a gradient.
    """

    def __init__(self, parameter: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__([parameter], dtype)
        self.flat: torch.Tensor = self._nothing()
        self._work: Work[torch.Tensor] | None = None

    def _nothing(self) -> torch.Tensor:
        (parameter,) = self.parameters
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[1:], dtype=self.held, device=parameter.device)
        return _table(indices, values, len(parameter) + 1)

    def _with_one_more(self, rows: torch.Tensor) -> torch.Tensor:
        (parameter,), count = self.parameters, rows.values().shape[0] + 1
        indices = rows.indices().new_full((1, count), len(parameter))
        indices[:, :-1] = rows.indices()
        values = rows.values().new_ones((count, *parameter.shape[1:]))
        values[:-1] = rows.values()
        return _table(indices, values, len(parameter) + 1)

    def check(self, index: int) -> torch.Tensor:
        return self.checked(index, self.parameters[index].shape, may_be_sparse=True)

    def put(self, index: int, scale: float) -> None:
        gradient = self.check(index)
        self.divide(index)
        rows = gradient if gradient.is_sparse else gradient.to_sparse(1)
        self.flat = self._with_one_more((rows.to(self.held) * scale).coalesce())
        self.took(index)

    def fill(self, scale: float) -> None:
        if not self.waiting:
            return
        if self.parameters[0].grad is not None:
            self.put(0, scale)
        else:
            self.flat = self._nothing()

    def reduce(self, all_reduce: Callable[..., Work[Any]], **tail: Any) -> Work[torch.Tensor]:
        """Start the reduction, by ``all_reduce``."""
        self._work = all_reduce(self.flat, **tail)
        return self._work

    def adopt(self) -> None:
        """Make the sum the parameter's ``.grad``, unless no rank has a gradient."""
        assert self._work is not None
        (parameter,), found = self.parameters, self._work.result()
        self.flat = self._nothing()
        if not found._nnz():
            return
        total = _table(found.indices()[:, :-1], found.values()[:-1].to(self.dtype), len(parameter))
        dense = parameter.grad is not None and not parameter.grad.is_sparse
        parameter.grad = total.to_dense() if dense else total
        if self.summed_over > 1:
            self.summed([parameter.grad])


def _table(indices: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a sparse table of ``rows`` rows that has ``values`` at ``indices``, which are sorted."""
    shape = (rows, *values.shape[1:])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)

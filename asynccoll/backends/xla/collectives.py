"""The collectives as XLA graphs: a local step before, the graph that all ranks trace, a local step after.

XLA has fewer collectives than we do, and on some platforms none for some dtypes or groups. The others are
built here from those that it has. What differs between ranks (where a row is put, how much is padded) is done
in ``prepare`` and ``finish``, in separate graphs; the collective's graph is the same on every rank.

Data that is only moved arrives here as integers (``dispatch`` converts it): XLA loses the sign of zero and
the payload of NaNs when it moves floats, whereas a sum of integers with zeros is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch_xla

from asynccoll.backends.api import ReduceOp, dtype_name, uncast

_native: ModuleType = torch_xla._XLAC

REDUCE = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "mul",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}

#: ``matrix[i][j]`` rows go from rank i to rank j.
Matrix = Sequence[Sequence[int]]


class Members:
    """The ranks of a group, and how they are described to XLA: as a partition of all replicas."""

    def __init__(self, ranks: tuple[int, ...], index: int, world_size: int) -> None:
        self.ranks = ranks
        self.index = index
        self.size: int = len(ranks)
        others = [rank for rank in range(world_size) if rank not in ranks]
        mine = list(ranks)
        self.is_world: bool = not others
        #: for all_reduce, whose groups may differ in size
        self.groups: list[list[int]] = [] if self.is_world else [mine, *([rank] for rank in others)]
        #: for the other collectives, whose groups must be of one size; None if that is impossible
        self.even: list[list[int]] | None = None
        if self.is_world:
            self.even = []
        elif len(others) % self.size == 0:
            rest = [others[i : i + self.size] for i in range(0, len(others), self.size)]
            self.even = [mine, *rest]


class Collective:
    """One call, as every rank of the group makes it."""

    #: whether ``prepare`` must know how many rows every rank sends to every other
    needs_matrix = False

    def __init__(self, members: Members, name: str) -> None:
        self.members = members
        self.name = name

    def text(self, x: torch.Tensor) -> str:
        """Return what all ranks must agree on."""
        return f"{self.name} {dtype_name(x.dtype)}{list(x.shape)}"

    def prepare(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return the input of the graph; ranks may differ in everything but its shape."""
        return x

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        """Trace the graph, the same on every rank, and return its result."""
        raise NotImplementedError

    def finish(self, result: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return this rank's part of the result."""
        return result


def _sum(x: torch.Tensor, members: Members) -> torch.Tensor:
    result: torch.Tensor = _native._xla_all_reduce("sum", x, 1.0, members.groups, True)
    return result


def _in_row(x: torch.Tensor, index: int, rows: int) -> torch.Tensor:
    """Return ``rows`` rows, of which row ``index`` is ``x`` and the others are zero."""
    placed = torch.zeros((rows, *x.shape), dtype=x.dtype, device=x.device)
    placed[index] = x
    return placed


class AllReduce(Collective):
    """Native, for groups of any size."""

    def __init__(self, members: Members, name: str, op: ReduceOp) -> None:
        super().__init__(members, f"{name} {op.value}")
        self._op = REDUCE[op]

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        result: torch.Tensor = _native._xla_all_reduce(self._op, x, 1.0, self.members.groups, True)
        return result


class Broadcast(Collective):
    """The sum of the source's data and the other ranks' zeros."""

    def __init__(self, members: Members, src: int) -> None:
        super().__init__(members, f"broadcast src={members.ranks[src]}")
        self._src = src

    def prepare(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return x if self.members.index == self._src else torch.zeros_like(x)

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        return _sum(x, self.members)


class AllGather(Collective):
    """Flat ``x`` to (n, len(x)): native, or a sum to which each rank contributes its row, and zeros."""

    def prepare(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        if self.members.even is not None:
            return x
        return _in_row(x, self.members.index, self.members.size)

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        members = self.members
        if members.even is None:
            return _sum(x, members)
        gathered: torch.Tensor = _native._xla_all_gather(x, 0, members.size, members.even, False, None, None)
        return gathered


class ReduceScatter(Collective):
    """(n, k) to this rank's row of the reduction: native, or cut from an all_reduce."""

    def __init__(self, members: Members, op: ReduceOp, name: str = "reduce_scatter") -> None:
        super().__init__(members, f"{name} {op.value}")
        self._op = REDUCE[op]

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        members = self.members
        result: torch.Tensor
        if members.even is None:
            result = _native._xla_all_reduce(self._op, x, 1.0, members.groups, True)
            return result
        result, _ = _native._xla_reduce_scatter(
            self._op, x, token, 1.0, 0, members.size, members.even, True, None, None
        )
        return result

    def finish(self, result: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return result[self.members.index] if self.members.even is None else result


class Scatter(ReduceScatter):
    """The rows (n, k) of ``src``, as a reduce_scatter in which the other ranks contribute zeros."""

    def __init__(self, members: Members, src: int) -> None:
        super().__init__(members, ReduceOp.SUM, f"scatter src={members.ranks[src]} by")


class AllToAll(Collective):
    """Rows (r, k) exchanged by split sizes, padded to the longest; a permutation is sent directly."""

    needs_matrix = True

    def __init__(self, members: Members) -> None:
        super().__init__(members, "all_to_all")
        self._pairs: list[list[int]] | None = None
        self._even = False

    def text(self, x: torch.Tensor) -> str:
        return f"{self.name} {dtype_name(x.dtype)}[rows, {x.shape[1]}]"

    def prepare(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        members = self.members
        counts = {count for row in matrix for count in row}
        self._even = len(counts) == 1 and members.even is not None
        if self._even:
            return x
        longest, mine = max(counts), matrix[members.index]
        self._pairs = _permutation(matrix) if members.is_world else None
        if self._pairs is not None:
            return _padded(x, longest)
        parts = uncast(torch.stack, [_padded(part, longest) for part in torch.split(x, list(mine))])
        if members.even is not None:
            return parts.flatten(0, 1)
        return _in_row(parts, members.index, members.size)

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        members = self.members
        result: torch.Tensor
        if self._pairs is not None:
            result, _ = _native._xla_collective_permute(x, token, self._pairs)
        elif members.even is not None:
            result, _ = _native._xla_all_to_all(x, token, 0, 0, members.size, members.even, True)
        else:
            result = _sum(x, members)
        return result

    def finish(self, result: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        members = self.members
        if self._even:
            return result
        wanted = [row[members.index] for row in matrix]
        if self._pairs is not None:
            return result[: sum(wanted)]
        longest = max(count for row in matrix for count in row)
        rows = result[:, members.index] if members.even is None else torch.split(result, longest)
        return uncast(torch.cat, [row[:count] for row, count in zip(rows, wanted, strict=True)])


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - part.shape[0]
    if not missing:
        return part
    return uncast(
        torch.cat, [part, torch.zeros((missing, *part.shape[1:]), dtype=part.dtype, device=part.device)]
    )


def _permutation(matrix: Matrix) -> list[list[int]] | None:
    """Return the (source, target) pairs, or None if a rank sends to, or receives from, more than one rank."""
    pairs = [[i, j] for i, row in enumerate(matrix) for j, count in enumerate(row) if count]
    alone = all(len({pair[end] for pair in pairs}) == len(pairs) for end in (0, 1))
    return pairs if alone else None


class Barrier(Collective):
    """The sum of one element of each rank."""

    def __init__(self, members: Members) -> None:
        super().__init__(members, "barrier")

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        return _sum(x, self.members)

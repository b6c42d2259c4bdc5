"""The collectives as XLA graphs: what is done locally before, what all ranks trace alike, what after.

XLA has fewer collectives than we do, and on some platforms none for some dtypes or groups; the rest are
built of those here. What differs between ranks (where a row is put, how much is padded) happens in
``prepare`` and ``finish``, in graphs of their own: the collective's graph is the same on every rank.

Data that only moves arrives here as integers (``dispatch`` sees to it): XLA's movement of floats loses
the sign of zero and the payload of NaNs, and a sum with zeros is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch_xla

from asynccoll.backends.api import ReduceOp, dtype_name, uncast

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Collective",
    "Members",
    "ReduceScatter",
    "Scatter",
]

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
    """The ranks of a group, and how XLA is told of them: as a partition of all replicas."""

    def __init__(self, ranks: tuple[int, ...], index: int, world_size: int) -> None:
        self.ranks = ranks
        self.index = index
        self.size: int = len(ranks)
        others = [rank for rank in range(world_size) if rank not in ranks]
        mine = list(ranks)
        self.is_world: bool = not others
        #: for all_reduce, whose groups may be of any sizes
        self.groups: list[list[int]] = [] if self.is_world else [mine, *([rank] for rank in others)]
        #: for the others, whose groups must be of one size; None where that is impossible
        self.even: list[list[int]] | None = None
        if self.is_world:
            self.even = []
        elif len(others) % self.size == 0:
            rest = [others[i : i + self.size] for i in range(0, len(others), self.size)]
            self.even = [mine, *rest]


class Collective:
    """One call, as every rank of the group makes it."""

    #: ``prepare`` must know how many rows every rank sends to every other.
    needs_matrix = False

    def __init__(self, members: Members, name: str) -> None:
        self.members = members
        self.name = name

    def text(self, x: torch.Tensor) -> str:
        """What all ranks must agree on."""
        return f"{self.name} {dtype_name(x.dtype)}{list(x.shape)}"

    def prepare(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """What goes into the graph; may differ between ranks in everything but its shape."""
        return x

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        """The graph: the same on every rank."""
        raise NotImplementedError

    def finish(self, result: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """This rank's part of what came out."""
        return result


def _sum(x: torch.Tensor, members: Members) -> torch.Tensor:
    result: torch.Tensor = _native._xla_all_reduce("sum", x, 1.0, members.groups, True)
    return result


def _in_row(x: torch.Tensor, index: int, rows: int) -> torch.Tensor:
    """``x`` as row ``index`` of ``rows``, the others zero."""
    placed = torch.zeros((rows, *x.shape), dtype=x.dtype, device=x.device)
    placed[index] = x
    return placed


class AllReduce(Collective):
    """Native, for groups of any sizes."""

    def __init__(self, members: Members, name: str, op: ReduceOp) -> None:
        super().__init__(members, f"{name} {op.value}")
        self._op = REDUCE[op]

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        result: torch.Tensor = _native._xla_all_reduce(self._op, x, 1.0, self.members.groups, True)
        return result


class Broadcast(Collective):
    """The sum of the source's data and everybody else's zeros."""

    def __init__(self, members: Members, src: int) -> None:
        super().__init__(members, f"broadcast src={members.ranks[src]}")
        self._src = src

    def prepare(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return x if self.members.index == self._src else torch.zeros_like(x)

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        return _sum(x, self.members)


class AllGather(Collective):
    """Flat ``x`` to (n, len(x)): native, or the sum of rows that are zero but for one's own."""

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
    """(n, k) to one's own row of the reduction: native, or cut from an all_reduce."""

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
    """The rows of ``src`` (n, k), summed with everybody else's zeros and shared out."""

    def __init__(self, members: Members, src: int) -> None:
        super().__init__(members, ReduceOp.SUM, f"scatter src={members.ranks[src]} by")


class AllToAll(Collective):
    """Rows (r, k) exchanged by split sizes, padded to the longest; a permutation goes directly."""

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
    """The pairs of (source, target) if every rank sends to one rank and receives from one at most."""
    pairs = [[i, j] for i, row in enumerate(matrix) for j, count in enumerate(row) if count]
    alone = all(len({pair[end] for pair in pairs}) == len(pairs) for end in (0, 1))
    return pairs if alone else None


class Barrier(Collective):
    """One element, summed."""

    def __init__(self, members: Members) -> None:
        super().__init__(members, "barrier")

    def trace(self, x: torch.Tensor, token: object) -> torch.Tensor:
        return _sum(x, self.members)

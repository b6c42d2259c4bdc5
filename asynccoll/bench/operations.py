"""What is measured, with the conventions of nccl-tests: what a size means, and what the bus has to carry.

For an operation whose result or input is divided among n ranks (all_gather, reduce_scatter, ...), the size is
that of the whole, and the count is that of one rank's part. The algorithm bandwidth is size over time; the
bus bandwidth is that, times what any algorithm has to move at least: https://github.com/NVIDIA/nccl-tests,
PERFORMANCE.md.

What a rank sends is a function of its rank and the index, so that every rank knows what has to arrive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from asynccoll.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective: how much of the whole a rank sends and receives, and what the bus carries of it."""

    name: str
    #: whether a rank sends, and receives, one n-th of the whole instead of all of it
    sends_part: bool
    receives_part: bool
    reduces: bool
    rooted: bool
    bus_factor: Callable[[int], float]

    @property
    def is_shared_out(self) -> bool:
        """Whether a size is divided among the ranks."""
        return self.sends_part or self.receives_part or self.name == "all_to_all"


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _once(_ranks: int) -> float:
    return 1.0


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", False, False, True, False, lambda n: 2 * (n - 1) / n),
        Operation("all_gather", True, False, False, False, _all_but_own),
        Operation("reduce_scatter", False, True, True, False, _all_but_own),
        Operation("all_to_all", False, False, False, False, _all_but_own),
        Operation("broadcast", False, False, False, True, _once),
        Operation("reduce", False, False, True, True, _once),
        Operation("gather", True, False, False, True, _all_but_own),
        Operation("scatter", False, True, False, True, _all_but_own),
        Operation("sendrecv", False, False, False, False, _once),
    )
}

#: By nccl-tests' names, and torch's.
DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}

#: How people and nccl-tests write sizes: ``4K``, ``16M``.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WRITTEN = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)

REDUCTIONS = ("sum", "prod", "min", "max", "avg")


@dataclass(slots=True)
class Case:
    """One operation at one size on one rank: its tensors, and the result that is expected."""

    operation: Operation
    dtype: torch.dtype
    reduction: str
    count: int  # as in nccl-tests: of one rank's part, if there are parts
    rank: int
    ranks: int
    device: torch.device
    root: int = 0
    #: every tensor that was handed out, so that those whose values grow in place can be zeroed
    made: list[torch.Tensor] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The size of the whole."""
        return self.whole * self.dtype.itemsize

    @property
    def whole(self) -> int:
        """The number of elements of the whole."""
        return self.count * (self.ranks if self.operation.is_shared_out else 1)

    @property
    def sent(self) -> int:
        """The number of elements that a rank sends."""
        return self.count if self.operation.sends_part else self.whole

    @property
    def received(self) -> int:
        """The number of elements that a rank receives."""
        return self.count if self.operation.receives_part else self.whole

    def input(self) -> torch.Tensor:
        """Return a fresh tensor with what this rank sends."""
        return self._keep(self._sent_by(self.rank).to(device=self.device, dtype=self.dtype))

    def output(self) -> torch.Tensor:
        """Return fresh memory for what this rank receives."""
        return self._keep(torch.zeros(self.received, dtype=self.dtype, device=self.device))

    def _keep(self, made: torch.Tensor) -> torch.Tensor:
        self.made.append(made)
        return made

    def _sent_by(self, rank: int) -> torch.Tensor:
        """Return small whole numbers, so that every dtype holds their sums exactly."""
        index = torch.arange(self.sent, device="cpu")
        if self.reduction == "prod" and self.operation.reduces:
            return 1 + (index % (self.ranks + 1) == rank).long()
        return (index + 3 * rank) % 5

    def expected(self) -> torch.Tensor | None:
        """Return what has to arrive here, on the CPU; None if nothing does."""
        if self.operation.name in ("reduce", "gather") and self.rank != self.root:
            return None
        return _EXPECTED[self.operation.name](self)

    def reduced(self) -> torch.Tensor:
        """Return the reduction of all ranks' contributions."""
        parts = [self._sent_by(rank).double() for rank in range(self.ranks)]
        total = parts[0]
        for part in parts[1:]:
            total = _COMBINE[self.reduction](total, part)
        return total / self.ranks if self.reduction == "avg" else total

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the part of rank ``index`` in the whole ``x``."""
        return x[index * self.count : (index + 1) * self.count]


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _everybodys(case: Case) -> torch.Tensor:
    return torch.cat([case._sent_by(rank) for rank in range(case.ranks)])


def _roots(case: Case) -> torch.Tensor:
    return case._sent_by(case.root)


_EXPECTED: dict[str, Callable[[Case], torch.Tensor]] = {
    "all_reduce": Case.reduced,
    "reduce": Case.reduced,
    "reduce_scatter": lambda case: case.part(case.reduced(), case.rank),
    "all_gather": _everybodys,
    "gather": _everybodys,
    "broadcast": _roots,
    "scatter": lambda case: case.part(_roots(case), case.rank),
    "all_to_all": lambda case: torch.cat(
        [case.part(case._sent_by(rank), case.rank) for rank in range(case.ranks)]
    ),
    "sendrecv": lambda case: case._sent_by((case.rank - 1) % case.ranks),
}


def make_case(
    name: str, size_bytes: int, *, dtype: str, reduction: str, rank: int, ranks: int, device: torch.device
) -> Case:
    """Make a case of at most ``size_bytes`` that divides by the ranks, with at least one element each."""
    operation, kind = OPERATIONS[name], DTYPES[dtype]
    elements = size_bytes // kind.itemsize
    count = max(1, elements // ranks if operation.is_shared_out else elements)
    return Case(operation, kind, reduction, count, rank, ranks, device)


def parse_size(written: str) -> int:
    """Return the size in bytes: ``"4K"``, ``"4 KiB"`` and ``"4096"`` are 4096.

    Raises:
        InvalidArgumentError: it is not of that form, or 0.
    """
    found = _WRITTEN.fullmatch(written.strip())
    if found is None:
        raise InvalidArgumentError(
            f"size {written!r} cannot be read; expected a number of bytes such as 4K or 16M"
        )
    size = int(found[1]) * _UNITS[found[2].upper()]
    if not size:  # one element would be measured, and reported with its own size
        raise InvalidArgumentError(f"size {written!r} is not possible; expected at least 1 byte")
    return size


def sizes_between(first: int, last: int, factor: int) -> Iterator[int]:
    """Yield sizes from ``first`` to ``last`` bytes, each ``factor`` times the one before.

    Raises:
        InvalidArgumentError: there would be none, or the sizes would never end.
    """
    if first < 1 or last < first or factor < 2:
        raise InvalidArgumentError(
            f"sizes from {first} to {last} bytes by a factor of {factor} are not possible; expected at least "
            "1 byte, an end that is no smaller, and a factor of at least 2"
        )
    size = first
    while size <= last:
        yield size
        size *= factor


def check_known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse unknown names.

    Raises:
        InvalidArgumentError: an unknown one; the text has the known ones.
    """
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"{what} {name!r} is none of {', '.join(known)}")


def wrong_elements(got: object, expected: torch.Tensor | None) -> int:
    """Return how many elements of a result are not as expected; all of them if its size differs."""
    if expected is None:
        return 0
    if not isinstance(got, torch.Tensor) or got.numel() != expected.numel():
        return expected.numel()
    found = got.detach().cpu().flatten()
    wanted = expected.to(found.dtype)
    near = torch.isclose(found.double(), wanted.double(), rtol=_tolerance(found.dtype), atol=0.0)
    return int((~near).sum())


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative tolerance: sums and products are exact; a mean may be rounded once more."""
    return 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0

"""What a collective costs in a group: alpha + beta * bytes, and how large buckets should therefore be.

Measured once per group, on the first lane that fuses much, as part of that call: every rank takes part at
the same place of the lane's order, and all of them go by the figures of the group's first rank. Any
other lane asks it for them at its own first such call. So bucket sizes are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import astuple, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from asynccoll.completion import Completion
from asynccoll.spec import ReduceOp

if TYPE_CHECKING:
    from asynccoll.lane import Lane

__all__ = ["Cost", "agreed"]

_LEAST_BUCKET_BYTES = 1 << 20
_MOST_BUCKET_BYTES = 64 << 20
#: Two sizes tell a line apart from noise: one that latency rules, and one that bandwidth does.
_SMALL_BYTES, _LARGE_BYTES = 16 << 10, 2 << 20
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one all_reduce (``alpha + beta * bytes``), and of packing a byte (``gamma``)."""

    alpha: float
    beta: float
    gamma: float

    def bucket_bytes(self, total_bytes: int) -> int:
        """The size of bucket that carries ``total_bytes`` soonest.

        Each bucket costs ``alpha``; while it travels the next one is packed, but nothing hides the first:
        ``total / size * alpha + size * gamma`` is least at the root of ``total * alpha / gamma``.
        """
        best = int((total_bytes * max(self.alpha, 0.0) / self.gamma) ** 0.5) if self.gamma > 0 else 0
        return min(max(best, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES)

    def __str__(self) -> str:
        per_mib = self.beta * 2**20 * 1e6
        packing = self.gamma * 2**20 * 1e6
        return (
            f"a call costs {self.alpha * 1e6:.0f} us and {per_mib:.0f} us/MiB, packing {packing:.0f} us/MiB"
        )

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float], gamma: float) -> Cost:
        """The line through two measured (bytes, seconds)."""
        beta = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(1e-6, small[1] - beta * small[0]), beta, gamma)


def agreed(lane: Lane, communicator: Any) -> Generator[Completion, None, Cost | None]:
    """The steps of a program after which all ranks of the lane have the same ``Cost`` (None: alone)."""
    group = lane.group
    if group.size == 1:
        return None
    if lane.cost is None:
        known = (0.0, 0.0, 0.0) if group.cost is None else astuple(group.cost)
        told = torch.tensor(known, dtype=torch.float64, device="cpu")
        yield communicator.broadcast(told, 0)
        if not told.any():
            told.copy_(
                torch.tensor(astuple((yield from _measured(communicator))), dtype=torch.float64, device="cpu")
            )
            yield communicator.broadcast(told, 0)
        lane.cost = group.cost = Cost(*told.tolist())
    return lane.cost


def _measured(communicator: Any) -> Generator[Completion, None, Cost]:
    found: list[tuple[int, float]] = []
    for size_bytes in (_SMALL_BYTES, _LARGE_BYTES):
        x = torch.zeros(size_bytes // 4, dtype=torch.float32, device="cpu")
        best = float("inf")
        for _ in range(_REPEATS):
            start = perf_counter()
            yield communicator.all_reduce(x, ReduceOp.SUM)
            best = min(best, perf_counter() - start)
        found.append((size_bytes, best))
    return Cost.fit(found[0], found[1], _packing(x))


def _packing(x: torch.Tensor) -> float:
    """Seconds per byte of copying ``x`` into new memory."""
    best = float("inf")
    for _ in range(_REPEATS):
        start = perf_counter()
        torch.cat([x, x])
        best = min(best, perf_counter() - start)
    return best / (2 * x.nbytes)

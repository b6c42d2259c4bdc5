"""What a collective costs in a group, alpha + beta * bytes, which determines how large buckets should be.

The costs are measured once per group, on the first lane that fuses much data, as part of that call: every
rank takes part at the same place in the lane's order, and all ranks use the figures of the group's first
rank. Any other lane gets them from that rank in its own first such call. So all ranks use the same bucket
sizes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import astuple

import torch

from asynccoll import host
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import Cost, ReduceOp
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion

#: The two message sizes to fit a line through: one dominated by latency, one by bandwidth.
_SMALL_BYTES, _LARGE_BYTES = 16 << 10, 2 << 20
_REPEATS = 3


def agreed(lane: Lane, communicator: Communicator) -> Generator[Completion, None, Cost | None]:
    """Run the steps of a program after which all ranks of the lane have the same ``Cost``.

    Returns that cost; None in a group of one rank.
    """
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


def _measured(communicator: Communicator) -> Generator[Completion, None, Cost]:
    found: list[tuple[int, float]] = []
    for size_bytes in (_SMALL_BYTES, _LARGE_BYTES):
        x = torch.zeros(size_bytes // 4, dtype=torch.float32, device="cpu")
        best = float("inf")
        for _ in range(_REPEATS):
            start = host.perf_counter()
            yield communicator.all_reduce(x, ReduceOp.SUM)
            best = min(best, host.perf_counter() - start)
        found.append((size_bytes, best))
    return Cost.fit(found[0], found[1], _packing(x))


def _packing(x: torch.Tensor) -> float:
    """Measure the seconds per byte of copying ``x`` into new memory."""
    best = float("inf")
    for _ in range(_REPEATS):
        start = host.perf_counter()
        torch.cat([x, x])
        best = min(best, host.perf_counter() - start)
    return best / (2 * x.nbytes)

"""Peers side by side: the same work by different means, interleaved in one run.

Latency on a shared machine drifts by more than the differences that matter here, so every round runs
every peer once, in an order that changes from round to round. The reported figures are the median over
rounds and the median of the ratios within a round.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter

import asynccoll as ac

Peer = Callable[[], Awaitable[object]]


@dataclass
class Series:
    """Seconds per operation of one peer, one entry a round."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """The tenth percentile: what it costs when the scheduler is kind."""
        return sorted(self.seconds)[len(self.seconds) // 10]

    def ratio_to(self, other: Series) -> float:
        """Return the median over rounds of this peer's time over the other's in the same round."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


async def side_by_side(
    peers: dict[str, Peer],
    *,
    rounds: int,
    operations: int,
    warmup: int = 1,
    settle: Callable[[], object] = lambda: None,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Series]:
    """Time ``operations`` of each peer in each of ``rounds`` rounds. All ranks make the same call.

    ``settle`` waits for the device, within the timed section; ``after_round`` is called after each round.
    """
    # The same order on every rank: all must run the same peer at the same time.
    order = random.Random(0)  # noqa: S311  # no secret
    series = {name: Series(name) for name in peers}
    names = list(peers)
    for name in names:
        for _ in range(warmup):
            await peers[name]()
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            peer = peers[name]
            settle()
            ac.barrier().wait()  # not awaited: this is also run without an event loop
            start = perf_counter()
            for _ in range(operations):
                await peer()
            settle()
            series[name].seconds.append((perf_counter() - start) / operations)
        after_round()
    return series

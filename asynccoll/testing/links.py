"""A link between two ranks: what a message over it takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """What a message takes: a latency, and its bytes over the bandwidth (Hockney's model, 1994).

    >>> Link(latency=1e-3, bandwidth=1e9).seconds(1_000_000)
    0.002
    """

    #: in seconds, always so long, or drawn between these two for each message of a simulation
    latency: float | tuple[float, float] = (20e-6, 2e-3)
    #: bytes a second
    bandwidth: float = 1e9

    def __post_init__(self) -> None:
        for one in self._range:
            check("latency of Link", one, (int, float), "a number of seconds, or a tuple (least, most)")
        check("bandwidth of Link", self.bandwidth, (int, float), "a number of bytes a second")
        least, most = self._range
        if not 0 <= least <= most or not self.bandwidth > 0:
            raise InvalidArgumentError(
                f"{self}: expected latency from 0 up, (least, most) in this order, and a bandwidth above 0"
            )

    @property
    def _range(self) -> tuple[float, float]:
        return self.latency if isinstance(self.latency, tuple) else (self.latency, self.latency)

    def seconds(self, size_bytes: float, chance: random.Random | None = None) -> float:
        """Of one message: one that is drawn, or the middle one.

        Latencies go by order of magnitude: most are short.
        """
        least, most = self._range
        part = 0.5 if chance is None else chance.random()
        latency = least * (most / least) ** part if least > 0 else most * part
        return latency + size_bytes / self.bandwidth

    @classmethod
    def fit(cls, measured: Iterable[tuple[float, float]]) -> Link:
        """From (bytes, seconds) of all_reduces on **two** ranks; at least two sizes.

        There a ring is two messages of half the bytes: twice the latency, and all bytes over the bandwidth.
        The line is that of least relative squares, or megabytes would drown what a small message says about
        the latency.

        >>> Link.fit([(1, 2.25), (8, 4.0)])
        Link(latency=1.0, bandwidth=4.0)

        Raises:
            InvalidArgumentError: there is only one size.
        """
        points = [(size_bytes, seconds) for size_bytes, seconds in measured]
        if len({size_bytes for size_bytes, _ in points}) < 2:
            raise InvalidArgumentError(f"a line needs measurements of two sizes, got {points}")
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        x0 = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
        y0 = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
        above = sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points, strict=True))
        slope = max(0.0, above / sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points, strict=True)))
        return cls(max(0.0, y0 - slope * x0) / 2, 1 / slope if slope else math.inf)

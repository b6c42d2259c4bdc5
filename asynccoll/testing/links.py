"""A link between two ranks: how long a message takes on it."""

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
    """How long a message takes: a latency, plus its bytes over the bandwidth (Hockney's model, 1994).

    >>> Link(latency=1e-3, bandwidth=1e9).seconds(1_000_000)
    0.002
    """

    #: in seconds: fixed, or a range from which it is drawn for each message of a simulation
    latency: float | tuple[float, float] = (20e-6, 2e-3)
    #: bytes per second
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
        """Return the seconds of one message, with a latency drawn by ``chance``, or else the median one.

        Latencies are log-uniform, so most are short; if the range starts at 0, they are uniform.
        """
        least, most = self._range
        part = 0.5 if chance is None else chance.random()
        latency = least * (most / least) ** part if least > 0 else most * part
        return latency + size_bytes / self.bandwidth

    @classmethod
    def fit(cls, measured: Iterable[tuple[float, float]]) -> Link:
        """Fit a link to (bytes, seconds) of all_reduces on **two** ranks, of at least two sizes.

        On two ranks a ring is two messages of half the bytes: twice the latency, plus all bytes over the
        bandwidth. The fit minimizes the squares of relative errors; else megabytes would drown out what
        small messages say about the latency.

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

"""Looking again and again for what another rank, or another process, does."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asynccoll import host


def looks(seconds: float = math.inf, *, first: float = 0.0005, longest: float = 0.02) -> Iterator[float]:
    """Yield at once, then after pauses that double from ``first`` to ``longest``, until ``seconds`` are over.

    Each time it yields the pause that follows.
    """
    deadline, pause = host.monotonic() + seconds, first
    while True:
        yield pause
        if host.monotonic() >= deadline:
            return
        host.sleep(pause)
        pause = min(2 * pause, longest)

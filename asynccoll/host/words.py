"""Times and ranks as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["duration", "listed"]


def duration(seconds: float) -> str:
    """``1.50 s``, ``12.3 ms`` or ``45 us``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def listed(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"

"""The cost model of collectives in a group (alpha + beta * bytes), and the bucket size that follows."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_BUCKET_BYTES = 1 << 20
_MOST_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds that an all_reduce takes (``alpha + beta * bytes``), and packing one byte (``gamma``)."""

    alpha: float
    beta: float
    gamma: float

    def bucket_bytes(self, total_bytes: int) -> int:
        """Return the bucket size that sends ``total_bytes`` fastest.

        Each bucket costs ``alpha``. While one is in flight the next is packed, but nothing hides packing the
        first: ``total / size * alpha + size * gamma`` is minimal at ``size = sqrt(total * alpha / gamma)``.
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
        """Return the cost model with ``alpha`` and ``beta`` from two measurements (bytes, seconds)."""
        beta = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(1e-6, small[1] - beta * small[0]), beta, gamma)

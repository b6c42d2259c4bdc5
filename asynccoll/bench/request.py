"""What is to be measured, and what was found: values that are passed between processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

#: Called on rank 0 with what happens: ``("start", {...})``, ``("step", {})``, ``("row", {...})``, ``("note",
#: {...})``.
Report: TypeAlias = Callable[[str, dict[str, object]], None]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What one run measures. The same on every rank."""

    operations: Sequence[str]
    sizes: Sequence[int]
    dtype: str = "float"
    reduction: str = "sum"
    #: calls of each peer in each round; 0 chooses by size
    iterations: int = 0
    warmup: int = 2
    rounds: int = 15
    #: empty for all that are available
    peers: Sequence[str] = ()
    backend: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchRequest:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Row:
    """One peer, one way, one size. Times are means over ranks, and over rounds as the names say.

    ``over_torch`` is the median over rounds of this time over that of ``torch.distributed`` in the same
    round; None without it. ``wrong`` counts wrong elements on all ranks.
    ``error`` is why a peer cannot do this, and then there is nothing else.
    """

    operation: str
    size_bytes: int
    count: int
    dtype: str
    reduction: str
    root: int
    peer: str
    way: str
    median_us: float | None = None
    low_us: float | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    over_torch: float | None = None
    wrong: int | None = None
    error: str = ""


def operations_in_a_round(iterations: int, size_bytes: int) -> int:
    """Return how many calls each peer makes in a round: as asked, else as many as take some milliseconds."""
    if iterations:
        return iterations
    return 30 if size_bytes <= 64 << 10 else 8 if size_bytes <= 1 << 20 else 2

"""Payloads other than plain tensors for the tests of collectives, by rank."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracle


class Point(NamedTuple):
    """A named tuple of a tensor and a number."""

    x: Tensor
    y: int


@dataclass
class Batch:
    """A dataclass with a tensor, a tree and a None."""

    images: Tensor
    scores: dict[str, Tensor]
    count: int
    nothing: None = None


def _float_from_bits(bits: int) -> float:
    return struct.unpack("d", struct.pack("Q", bits))[0]


#: Numbers that a conversion to float32, or to decimal text, would change.
NUMBERS: dict[str, Callable[[int], Any]] = {
    "zero": lambda rank: 0,
    "past 2**24": lambda rank: 2**24 + 1 + rank,
    "past 2**53": lambda rank: 2**53 + 1 + rank,
    "near 2**63": lambda rank: 2**63 - 1 - rank,
    "near -2**63": lambda rank: -(2**63) + rank,
    "0.1": lambda rank: 0.1 * (rank + 1),
    "subnormal": lambda rank: 5e-324 * (rank + 1),
    "largest": lambda rank: 1.7976931348623157e308,
    "inf": lambda rank: float("inf") if rank % 2 else float("-inf"),
    "nan": lambda rank: _float_from_bits(0x7FF8_0000_0000_0001 + rank),
    "-0.0": lambda rank: -0.0,
    "bool": lambda rank: rank % 2 == 0,
    "complex": lambda rank: complex(0.1 + rank, -0.0),
}

TEXTS: dict[str, Callable[[int], Any]] = {
    "empty": lambda rank: "",
    "empty on some": lambda rank: "x" * (rank % 2),
    "ascii": lambda rank: f"rank {rank}",
    "héllo": lambda rank: "héllo",
    "日本語": lambda rank: "日本語" * (rank + 1),
    "emoji": lambda rank: "👩‍👩‍👧‍👦🏴‍☠️" * rank,
    "zero byte": lambda rank: f"a\0b{rank}",
    "90 kB": lambda rank: "ß€" * 18_000 + str(rank),
    "90 kB on one": lambda rank: "é" * 45_000 if rank == 0 else "short",
    "path": lambda rank: Path(f"/data/日本/{rank}.bin"),
}


def flat_dict(rank: int) -> dict[str, Tensor]:
    """A dict whose keys are inserted in reverse order on every other rank."""
    items = [
        ("weight", oracle.counting(rank, (2, 3), torch.float32)),
        ("bias", oracle.counting(rank, (3,), torch.float64)),
        ("steps", oracle.counting(rank, (), torch.int64)),
        ("also a bias", oracle.counting(rank, (3,), torch.float64, seed=1)),
    ]
    return dict(reversed(items)) if rank % 2 else dict(items)


def point(rank: int) -> Point:
    """A named tuple."""
    return Point(oracle.counting(rank, (4,), torch.float32), rank + 2**40)


def batch(rank: int) -> Batch:
    """A dataclass that holds a dict."""
    return Batch(oracle.counting(rank, (2, 2), torch.bfloat16), flat_dict(rank), rank)


def nested(rank: int) -> dict[str, Any]:
    """Every kind of node inside another, with None as structure."""
    return {
        "list": [oracle.counting(rank, (1,), torch.int16), [rank, 2.5 * rank]],
        "tuple": (None, (oracle.counting(rank, (2, 1), torch.complex64),)),
        "named": point(rank),
        "data": batch(rank),
        "empty": [{}, (), []],
        "deep": {"er": {"est": {"x": oracle.counting(rank, (5,), torch.float32)}}},
    }


#: Trees whose leaves can all be reduced.
TREES: dict[str, Callable[[int], Any]] = {
    "dict": flat_dict,
    "list": lambda rank: [oracle.counting(rank, (k,), torch.float32, k) for k in range(4)],
    "tuple": lambda rank: (oracle.counting(rank, (2,), torch.int32), rank, 0.5 * rank),
    "numbers": lambda rank: {"loss": 0.25 * rank, "seen": 2**60 + rank, "ok": rank == 0},
    "named tuple": point,
    "dataclass": batch,
    "nested": nested,
    "many": lambda rank: [oracle.counting(rank, (3,), torch.float32, k) for k in range(100)],
}

#: Trees whose leaves can only be moved: they include text.
TEXT_TREES: dict[str, Callable[[int], Any]] = {
    "of text": lambda rank: {"name": f"rank {rank} é", "path": Path("a") / str(rank)},
    "of all": lambda rank: [rank, "日本" * rank, {"x": oracle.moving(rank, (2,), torch.uint8)}],
}

#: All values that can be moved, by name.
MOVABLE: dict[str, Callable[[int], Any]] = {**NUMBERS, **TEXTS}


def of_all(make: Callable[[int], Any], size: int) -> list[Any]:
    """Return the payloads of all ranks."""
    return [make(rank) for rank in range(size)]

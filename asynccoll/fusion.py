"""Many small tensors as few large ones: packed into buckets, sent, and handed back as views.

Buckets are filled in leaf order, by dtype and device, up to a size: a function of the tree alone, so
that every rank makes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["BUCKET_BYTES", "Bucket", "buckets", "pack", "unpack"]

#: As DDP's: large enough to reach the bandwidth, small enough to overlap.
BUCKET_BYTES = 25 << 20


class Bucket(NamedTuple):
    """The leaves (by position) that travel together."""

    indices: tuple[int, ...]


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Which of ``tensors`` travel together: same dtype and device, at most ``limit_bytes`` (or one)."""
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    full: list[Bucket] = []
    for index, x in enumerate(tensors):
        kind = (x.dtype, x.device)
        size = x.numel() * x.element_size()
        members, used = filling.get(kind, ([], 0))
        if members and used + size > limit_bytes:
            full.append(Bucket(tuple(members)))
            members, used = [], 0
        members.append(index)
        filling[kind] = (members, used + size)
    return [*full, *(Bucket(tuple(members)) for members, _ in filling.values())]


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of the elements of ``tensors``, in order."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Views of ``flat`` with ``shapes``: the inverse of ``pack``."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

"""Which memory calls that are not over read and write, so that one that depends on another is seen.

Knows tensors, and nothing of what is done with them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

from asynccoll.memory import has_memory

__all__ = ["Touched", "share_bytes"]

#: Of memory that spans more, it is assumed that tensors which lie across each other share some.
_MOST_COMPARED_BYTES = 256 << 20

Owner = TypeVar("Owner")


class _Touch(NamedTuple, Generic[Owner]):
    x: torch.Tensor
    writes: bool
    owner: Owner


class _Union:
    """A set of addresses, as intervals that do not meet."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def meets(self, start: int, end: int) -> bool:
        """Whether one of ``start`` to ``end`` is among them."""
        after = bisect_right(self._ends, start)  # the first interval that ends behind `start`
        return after < len(self._starts) and self._starts[after] < end

    def add(self, start: int, end: int) -> None:
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]


class _Storage(Generic[Owner]):
    """What is read and written of one piece of memory."""

    __slots__ = ("read", "touches", "written")

    def __init__(self) -> None:
        self.touches: list[_Touch[Owner]] = []
        self.read = _Union()
        self.written = _Union()


class Touched(Generic[Owner]):
    """The tensors that calls read and write, by whose calls they are."""

    __slots__ = ("_storages",)

    def __init__(self) -> None:
        self._storages: dict[int, _Storage[Owner]] = {}

    def add(self, x: torch.Tensor, writes: bool, owner: Owner) -> None:
        """``owner`` reads ``x``, or writes to it."""
        if not x.numel():
            return
        storage = self._storages.setdefault(_storage_of(x), _Storage())
        storage.touches.append(_Touch(x, writes, owner))
        (storage.written if writes else storage.read).add(*_span(x))

    def conflicts(self, x: torch.Tensor, writes: bool) -> Iterator[Owner]:
        """Those whose calls must be over before ``x`` is read, or written to."""
        storage = self._storages.get(_storage_of(x)) if x.numel() else None
        if storage is None:
            return
        start, end = _span(x)
        if not (storage.written.meets(start, end) or (writes and storage.read.meets(start, end))):
            return
        for touch in storage.touches:
            if (writes or touch.writes) and share_bytes(touch.x, x):
                yield touch.owner


def _storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if has_memory(x) else id(x)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """From its first byte to behind its last one; lazy tensors have no bytes, and are themselves alone."""
    if not has_memory(x):
        return id(x), id(x) + 1
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.element_size()


def share_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common, also if they lie across each other, as columns do."""
    (a, b), (c, d) = _span(x), _span(y)
    if a >= d or c >= b:
        return False
    if x is y or (x.is_contiguous() and y.is_contiguous()):
        return True
    first, last = min(a, c), max(b, d)
    if last - first > _MOST_COMPARED_BYTES:
        return True
    mine, others = (_marked(tensor, first, last) for tensor in (x, y))
    return bool((mine & others).any())


def _marked(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Which of the bytes from ``first`` to ``last`` are of ``x``."""
    size = x.element_size()
    mask = torch.zeros(last - first, dtype=torch.bool, device="cpu")
    shape = [1 if stride == 0 else extent for extent, stride in zip(x.shape, x.stride(), strict=True)]
    strides = [stride * size for stride in x.stride()]
    mask.as_strided((*shape, size), (*strides, 1), x.data_ptr() - first)[...] = True
    return mask

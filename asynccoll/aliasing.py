"""Which tensors are memory with an address, which share it, and whose it is while calls are out.

Knows tensors, and nothing of what is done with them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

__all__ = ["Extents", "has_memory", "may_overlap", "overlap", "same_memory"]

#: Of memory that spans more, it is assumed that tensors which lie across each other share some.
_MOST_COMPARED_BYTES = 256 << 20
#: So many extents are kept before it is looked which of them are of no more interest.
_FEW = 64

Owner = TypeVar("Owner")


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is memory with an address; a lazy tensor (XLA) is a value that is computed some day."""
    return x.device.type != "xla"


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors begin at one address. Of lazy ones, which have none, it is never said."""
    return x.data_ptr() == y.data_ptr() and has_memory(x)


def may_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are views of one memory."""
    return has_memory(x) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two contiguous tensors have bytes in common."""
    at, other = x.data_ptr(), y.data_ptr()
    return at < other + y.nbytes and other < at + x.nbytes


class Extent(NamedTuple):
    """The bytes in which a tensor lies, which it may be spread over; ``dense``: all of them are its own."""

    start: int
    end: int
    dense: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Extent:
        """That of ``x``; what has no bytes of its own (lazy, sparse) is itself alone."""
        if not _has_bytes(x):
            return cls(id(x), id(x) + 1, True, (), (), 1)
        start, size = x.data_ptr(), x.element_size()
        if x.is_contiguous():
            return cls(start, start + x.nbytes, True, (), (), size)
        shape, strides = tuple(x.shape), x.stride()
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        return cls(start, start + (last + 1) * size, False, shape, strides, size)

    def meets(self, other: Extent) -> bool:
        """Whether the two have bytes in common, also if they lie across each other, as columns do."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if (self.dense and other.dense) or self == other:
            return True
        first, last = min(self.start, other.start), max(self.end, other.end)
        if last - first > _MOST_COMPARED_BYTES:
            return True
        return bool((self._mark(first, last) & other._mark(first, last)).any())

    def _mark(self, first: int, last: int) -> torch.Tensor:
        """Which of the bytes from ``first`` to ``last`` are of this."""
        mask = torch.zeros(last - first, dtype=torch.bool, device="cpu")
        if self.dense:
            mask[self.start - first : self.end - first] = True
            return mask
        each = zip(self.shape, self.strides, strict=True)
        shape = [1 if stride == 0 else extent for extent, stride in each]
        strides = [stride * self.size for stride in self.strides]
        mask.as_strided((*shape, self.size), (*strides, 1), self.start - first)[...] = True
        return mask


def _has_bytes(x: torch.Tensor) -> bool:
    """Whether ``x`` lies at its address itself: lazy tensors do not, nor sparse ones, whose parts do."""
    return x.layout is torch.strided and has_memory(x)


def _storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if _has_bytes(x) else id(x)


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
    """What is whose of one piece of memory."""

    __slots__ = ("owned", "union")

    def __init__(self) -> None:
        self.owned: list[tuple[Extent, Owner]] = []
        self.union = _Union()

    def add(self, extent: Extent, owner: Owner) -> None:
        self.owned.append((extent, owner))
        self.union.add(extent.start, extent.end)

    def without(self, is_over: Callable[[Owner], bool]) -> _Storage[Owner]:
        left: _Storage[Owner] = _Storage()
        for extent, owner in self.owned:
            if not is_over(owner):
                left.add(extent, owner)
        return left


class Extents(Generic[Owner]):
    """Whose memory is whose: the extents of tensors, until their owners are over. No tensor is kept alive."""

    __slots__ = ("_count", "_is_over", "_most", "_storages")

    def __init__(self, is_over: Callable[[Owner], bool]) -> None:
        self._is_over = is_over
        self._storages: dict[int, _Storage[Owner]] = {}
        self._count = 0
        self._most = _FEW

    def __bool__(self) -> bool:
        return bool(self._storages)

    def add(self, x: torch.Tensor, owner: Owner) -> None:
        """``x`` is ``owner``'s from now on."""
        if not x.numel():
            return
        if self._count >= self._most:
            self._forget()
        storage = self._storages.get(key := _storage_of(x))
        if storage is None:
            storage = self._storages[key] = _Storage()
        storage.add(Extent.of(x), owner)
        self._count += 1

    def owners(self, x: torch.Tensor) -> Iterator[Owner]:
        """Those who are not over and whose memory ``x`` shares."""
        key = _storage_of(x)
        storage = self._storages.get(key) if x.numel() else None
        if storage is None:
            return
        extent = Extent.of(x)
        if not storage.union.meets(extent.start, extent.end):
            return
        self._count -= len(storage.owned)
        storage = storage.without(self._is_over)
        self._count += len(storage.owned)
        if not storage.owned:
            del self._storages[key]
            return
        self._storages[key] = storage
        for other, owner in storage.owned:
            if other.meets(extent):
                yield owner

    def _forget(self) -> None:
        """Forget those who are over."""
        left = {key: storage.without(self._is_over) for key, storage in self._storages.items()}
        self._storages = {key: storage for key, storage in left.items() if storage.owned}
        self._count = sum(len(storage.owned) for storage in self._storages.values())
        self._most = max(_FEW, 2 * self._count)

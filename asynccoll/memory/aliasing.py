"""Which tensors have memory with an address, which ones share memory, and which memory is claimed.

A *claim* is an object (usually a ``Work``) that reserves memory until the claim is over. This module must not
know what is done with the memory in the meantime.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch

from asynccoll import host
from asynccoll.host.misfits import misfit
from asynccoll.plan.trees import flatten

#: Two non-contiguous tensors are compared byte by byte if they span at most this; else they count as
#: overlapping.
_MOST_COMPARED_BYTES = 256 << 20
#: Claims that are over are removed only once there are this many stretches.
_FEW = 64
_is_xla: Callable[[torch.Tensor], bool] = attrgetter("is_xla")


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` has memory with an address; a lazy tensor (XLA) is a value that is computed later."""
    return not _is_xla(x)


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors begin at the same address. False for lazy tensors, which have none."""
    return x.data_ptr() == y.data_ptr() and has_memory(x)


def may_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors overlap, each from its first to its last byte.

    Like ``numpy.may_share_memory``, it never misses shared memory, but is also True for, say, different
    columns of one matrix, which share none. It is False for lazy tensors (XLA), which have no memory.
    """
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        raise misfit("x and y of may_overlap", "tensors", (x, y))
    if not has_memory(x):
        return False
    start, other = x.data_ptr(), y.data_ptr()
    return max(start, other) < min(start + span_bytes(x), other + span_bytes(y))


def span_bytes(x: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last byte of ``x``."""
    if x.is_contiguous():
        return x.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


class _Spread(NamedTuple):
    """The layout of a non-contiguous tensor: strides in elements; ``size``: the bytes of an element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    def comb(self) -> tuple[int, int] | None:
        """Return ``(step, run)`` in bytes if the tensor is equally spaced runs, as columns are; else None."""
        step, run = 0, self.size
        for stride, extent in sorted(zip(self.strides, self.shape, strict=True)):
            step_bytes = stride * self.size
            if extent == 1 or stride == 0:
                continue
            if not step and step_bytes == run:
                run *= extent
            elif not step:
                step, rows = step_bytes, extent
            elif step_bytes == step * rows:
                rows *= extent
            else:
                return None
        return (step, run) if step >= run else None


class _Extent(NamedTuple):
    """The address range of a tensor. ``spread`` is None if the tensor uses all of its bytes."""

    start: int
    end: int
    spread: _Spread | None

    @classmethod
    def of(cls, x: torch.Tensor) -> _Extent:
        """Return the extent of ``x``. A lazy or sparse tensor has no address range, and meets only itself."""
        if x.layout is not torch.strided or not has_memory(x):
            return cls(id(x), id(x) + 1, None)
        start = x.data_ptr()
        spread = None if x.is_contiguous() else _Spread(tuple(x.shape), x.stride(), x.element_size())
        return cls(start, start + span_bytes(x), spread)

    def is_apart_from(self, other: _Extent) -> bool:
        """Whether one range ends before the other begins, or is empty."""
        return max(self.start, other.start) >= min(self.end, other.end)

    def meets(self, other: _Extent) -> bool:
        """Whether the two tensors share bytes. Columns of one matrix do not, though their ranges overlap."""
        if self.is_apart_from(other):
            return False
        if self == other or not (self.spread or other.spread):
            return True
        mine, others = self.spread and self.spread.comb(), other.spread and other.spread.comb()
        if mine and others and mine[0] == others[0]:
            apart = (other.start - self.start) % mine[0]
            return apart < mine[1] or mine[0] - apart < others[1]
        first, last = min(self.start, other.start), max(self.end, other.end)
        if last - first > _MOST_COMPARED_BYTES:
            return True
        return bool((self._mark(first, last) & other._mark(first, last)).any())

    def _mark(self, first: int, last: int) -> torch.Tensor:
        """Return a mask of the bytes from ``first`` to ``last``, true for the bytes of this tensor."""
        mask = torch.zeros(last - first, dtype=torch.bool, device="cpu")
        if self.spread is None:
            mask[self.start - first : self.end - first] = True
            return mask
        shape, strides, size = self.spread
        each = zip(shape, strides, strict=True)
        extents = [1 if stride == 0 else extent for extent, stride in each]
        steps = [stride * size for stride in strides]
        mask.as_strided((*extents, size), (*steps, 1), self.start - first)[...] = True
        return mask


class Claim(Protocol):
    """An object that reserves the memory of ``out`` until it is over."""

    @property
    def claims(self) -> bool:
        """Whether the claim still holds."""

    @property
    def out(self) -> object:
        """The tensor, or tree of tensors, that is claimed."""


_Ref = Callable[[], Claim | None]


class _Stretch:
    """An address range and the claims in it. There are several claims only if their ranges overlap."""

    __slots__ = ("claims", "end", "start")

    def __init__(self, extent: _Extent, claim: _Ref) -> None:
        self.start, self.end = extent.start, extent.end
        self.claims = [(extent, claim)]

    def join(self, other: _Stretch) -> None:
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)
        self.claims += other.claims

    def is_claimed(self) -> bool:
        """Forget the claims that are over. Returns whether any are left."""
        self.claims = [one for one in self.claims if _holds(one[1])]
        return bool(self.claims)

    def find(self, extent: _Extent, but: Claim | None) -> Claim | None:
        for other, ref in self.claims:
            claim = ref()
            if claim is not None and claim is not but and claim.claims and extent.meets(other):
                return claim
        return None


def _holds(ref: _Ref) -> bool:
    claim = ref()
    return claim is not None and claim.claims


class _Memory:
    """The claims on one device's memory: stretches sorted by address, none of which overlap.

    They are kept by address, not by storage: memory from NumPy or DLPack has a storage for each of its views.
    """

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._most = _FEW

    def _across(self, extent: _Extent | _Stretch) -> slice:
        """Return the slice of the stretches that overlap the range of ``extent``."""
        first = bisect_right(self._stretches, extent.start, key=_END)
        return slice(first, bisect_left(self._stretches, extent.end, lo=first, key=_START))

    def add(self, extent: _Extent, claim: _Ref) -> None:
        if len(self._stretches) >= self._most:
            self._stretches = [one for one in self._stretches if one.is_claimed()]
            self._most = max(_FEW, 2 * len(self._stretches))
        added = _Stretch(extent, claim)
        across = self._across(added)
        for other in self._stretches[across]:
            if other.is_claimed():
                added.join(other)
        self._stretches[across] = [added]

    def find(self, extent: _Extent, but: Claim | None) -> Claim | None:
        """Return a claim other than ``but`` that still holds bytes of ``extent``, or None."""
        for stretch in self._stretches[self._across(extent)]:
            if (found := stretch.find(extent, but)) is not None:
                return found
        return None

    def is_claimed(self) -> bool:
        """Forget the stretches without claims at the end of the list. Returns whether any stretch is left.

        Each call checks only the end. That is enough to drop this object once all claims are over.
        """
        while self._stretches and not self._stretches[-1].is_claimed():
            self._stretches.pop()
        return bool(self._stretches)


_START, _END = attrgetter("start"), attrgetter("end")


class Claims:
    """All claims, by the memory that they claim. The claims are weakly referenced.

    Most claims are over before ``find`` is called. So ``add`` only records a claim, ``is_over`` removes it
    again, and ``find`` determines the addresses of those that are left.
    """

    def __init__(self) -> None:
        # Claims whose addresses have not been determined yet, by ``id``. Changed without the lock, since
        # garbage collection may add one (for a dropped work) in a thread that holds any lock.
        self._new: dict[int, _Ref] = {}
        self._memories: dict[torch.device, _Memory] = {}
        self._lock = host.Lock()

    def unlock(self) -> None:
        """Replace the lock in a forked child, where a thread that held it does not exist."""
        self._lock = host.Lock()

    def add(self, claim: Claim) -> None:
        """Add ``claim``, to be found until it is over."""
        self._new[id(claim)] = weakref.ref(claim)

    def is_over(self, claim: Claim) -> None:
        """Remove ``claim``, which is over, if its addresses have not been determined yet."""
        self._new.pop(id(claim), None)

    def _look(self) -> None:
        """Determine the addresses of the new claims that are not over. Called with the lock held."""
        while self._new:
            try:
                _, ref = self._new.popitem()
            except KeyError:  # another thread has removed the last one
                return
            claim = ref()
            if claim is None or not claim.claims:
                continue
            for x in flatten(claim.out)[0]:
                extent = _Extent.of(x)
                if extent.start < extent.end:
                    self._memories.setdefault(x.device, _Memory()).add(extent, ref)

    def find(self, xs: Iterable[torch.Tensor], but: Claim | None = None) -> Claim | None:
        """Return a claim other than ``but`` that still holds bytes of ``xs``, or None."""
        if not (self._new or self._memories):
            return None
        with self._lock:
            if self._new:
                self._look()
            for x in xs if self._memories else ():
                memory = self._memories.get(x.device)
                if memory is None:
                    continue
                if not memory.is_claimed():
                    del self._memories[x.device]
                elif (found := memory.find(_Extent.of(x), but)) is not None:
                    return found
        return None

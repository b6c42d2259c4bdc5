"""Which tensors are memory with an address, which share it, and who claims it for a while.

Knows tensors, and nothing of what is done with them.
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

__all__ = ["Claim", "Claims", "has_memory", "may_overlap", "same_memory"]

#: Of memory that spans more, it is assumed that tensors which lie across each other share some.
_MOST_COMPARED_BYTES = 256 << 20
#: So many claims are kept before it is looked which of them are over.
_FEW = 64
_is_xla: Callable[[torch.Tensor], bool] = attrgetter("is_xla")


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is memory with an address; a lazy tensor (XLA) is a value that is computed some day."""
    return not _is_xla(x)


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors begin at one address. Of lazy ones, which have none, it is never said."""
    return x.data_ptr() == y.data_ptr() and has_memory(x)


def may_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether some bytes of one tensor lie between the first and the last of the other, as views of one may.

    As ``numpy.may_share_memory``: it never misses shared memory, and says True of columns that lie across
    each other, too. Lazy tensors (XLA) have no memory, and are never said to overlap.
    """
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        raise misfit("x and y of may_overlap", "tensors", (x, y))
    if not has_memory(x):
        return False
    start, other = x.data_ptr(), y.data_ptr()
    return max(start, other) < min(start + _span_bytes(x), other + _span_bytes(y))


def _span_bytes(x: torch.Tensor) -> int:
    """How many bytes there are from the first to the last of ``x``."""
    if x.is_contiguous():
        return x.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


class _Spread(NamedTuple):
    """How the elements of a tensor that is not dense lie."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    def comb(self) -> tuple[int, int] | None:
        """``(step, run)`` if it is runs of that many bytes at equal steps, as columns are."""
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
    """The bytes in which a tensor lies: all of them are its own unless it is ``spread`` over them."""

    start: int
    end: int
    spread: _Spread | None

    @classmethod
    def of(cls, x: torch.Tensor) -> _Extent:
        """That of ``x``; what has no bytes of its own (lazy tensors, sparse ones) is itself alone."""
        if x.layout is not torch.strided or not has_memory(x):
            return cls(id(x), id(x) + 1, None)
        start = x.data_ptr()
        spread = None if x.is_contiguous() else _Spread(tuple(x.shape), x.stride(), x.element_size())
        return cls(start, start + _span_bytes(x), spread)

    def is_apart_from(self, other: _Extent) -> bool:
        """Whether one ends before the other begins, or has no bytes."""
        return max(self.start, other.start) >= min(self.end, other.end)

    def meets(self, other: _Extent) -> bool:
        """Whether the two have bytes in common, also if they lie across each other, as columns do."""
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
        """Which of the bytes from ``first`` to ``last`` are of this."""
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
    """Whose memory it is for a while."""

    @property
    def claims(self) -> bool:
        """Whether it is not over."""

    @property
    def out(self) -> object:
        """What is claimed: a tensor, or a tree of tensors."""


_Ref = Callable[[], Claim | None]


class _Stretch:
    """Bytes from the first to the last of claims that lie across each other; mostly there is one."""

    __slots__ = ("claims", "end", "start")

    def __init__(self, extent: _Extent, claim: _Ref) -> None:
        self.start, self.end = extent.start, extent.end
        self.claims = [(extent, claim)]

    def join(self, other: _Stretch) -> None:
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)
        self.claims += other.claims

    def is_claimed(self) -> bool:
        """Whether a claim is left, once those that are over are forgotten."""
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
    """What is claimed of one device's memory: stretches in the order of their addresses, none across another.

    By address, not by storage: memory that came from NumPy or by DLPack has a storage for each view of it.
    """

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._most = _FEW

    def _across(self, extent: _Extent | _Stretch) -> slice:
        """Where the stretches are that have a byte between the first and the last of ``extent``."""
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
        """One that is not over, on bytes of ``extent``; any ``but`` this."""
        for stretch in self._stretches[self._across(extent)]:
            if (found := stretch.find(extent, but)) is not None:
                return found
        return None

    def is_claimed(self) -> bool:
        """Whether any of it may be: forgets the last stretches that are not, which in time are all."""
        while self._stretches and not self._stretches[-1].is_claimed():
            self._stretches.pop()
        return bool(self._stretches)


_START, _END = attrgetter("start"), attrgetter("end")


class Claims:
    """All claims, by the memory that is claimed. Nothing is kept alive here.

    Most claims are over before anybody asks. So one is only noted down, struck out if it is over by then, and
    looked at when somebody asks.
    """

    def __init__(self) -> None:
        # Not looked at yet, by address. Changed without a lock: garbage is collected with anybody's held.
        self._new: dict[int, _Ref] = {}
        self._memories: dict[torch.device, _Memory] = {}
        self._lock = host.Lock()

    def unlock(self) -> None:
        """In a forked child: whichever thread held the lock is not there."""
        self._lock = host.Lock()

    def add(self, claim: Claim) -> None:
        """Until it is over, what it claims is nobody else's."""
        self._new[id(claim)] = weakref.ref(claim)

    def is_over(self, claim: Claim) -> None:
        """It claims nothing any more: nobody need look at it."""
        self._new.pop(id(claim), None)

    def _look(self) -> None:
        """Find out where the memory is of those that are new, and not over."""
        while self._new:
            try:
                _, ref = self._new.popitem()
            except KeyError:  # another thread has struck out the last one
                return
            claim = ref()
            if claim is None or not claim.claims:
                continue
            for x in flatten(claim.out)[0]:
                extent = _Extent.of(x)
                if extent.start < extent.end:
                    self._memories.setdefault(x.device, _Memory()).add(extent, ref)

    def find(self, xs: Iterable[torch.Tensor], but: Claim | None = None) -> Claim | None:
        """A claim on bytes of ``xs`` that is not over; any ``but`` this."""
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

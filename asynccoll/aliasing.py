"""Which tensors are memory with an address, which share it, and who claims it for a while.

Knows tensors, and nothing of what is done with them.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from asynccoll.forks import renew
from asynccoll.trees import flatten

__all__ = ["Claim", "Claims", "has_memory", "may_overlap", "overlap", "same_memory"]

#: Of memory that spans more, it is assumed that tensors which lie across each other share some.
_MOST_COMPARED_BYTES = 256 << 20
#: So many claims on one storage are compared one by one.
_MOST_COMPARED = 4
#: So many storages are kept before it is looked which claims on them are over.
_FEW = 64

_storage = torch.Tensor.untyped_storage


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
        if x.is_contiguous():
            return cls(start, start + x.nbytes, None)
        spread = _Spread(tuple(x.shape), x.stride(), x.element_size())
        last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
        return cls(start, start + (last + 1) * spread.size, spread)

    def meets(self, other: _Extent) -> bool:
        """Whether the two have bytes in common, also if they lie across each other, as columns do."""
        if self.start >= other.end or other.start >= self.end:
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


def _storage_of(x: torch.Tensor) -> int:
    """What two tensors that share memory have in common."""
    try:
        return _storage(x).data_ptr()
    except RuntimeError:  # sparse, and others that have none
        return id(x)


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


class Claim(Protocol):
    """Whose memory it is for a while."""

    @property
    def claims(self) -> bool:
        """Whether it is not over."""

    @property
    def out(self) -> Any:
        """What is claimed: a tensor, or a tree of tensors."""


_Ref = Callable[[], Claim | None]


class _Storage:
    """The claims on parts of one piece of memory."""

    __slots__ = ("_known", "_spans", "claims")

    def __init__(self) -> None:
        self.claims: list[tuple[_Ref, list[_Extent]]] = []
        self._spans: _Union | None = None  # of the first so many
        self._known = 0

    def find(self, x: torch.Tensor) -> Claim | None:
        """One that is not over, on bytes of ``x``."""
        extent = _Extent.of(x)
        if (len(self.claims) <= _MOST_COMPARED or self._may_meet(extent)) and self.forget():
            for ref, extents in self.claims:
                if any(map(extent.meets, extents)):
                    return ref()
        return None

    def _may_meet(self, extent: _Extent) -> bool:
        """No where none does, which is soon seen, however many there are."""
        spans = self._spans = self._spans or _Union()
        for _, extents in self.claims[self._known :]:
            for other in extents:
                spans.add(other.start, other.end)
        self._known = len(self.claims)
        return spans.meets(extent.start, extent.end)

    def forget(self) -> bool:
        """Forget those that are over; whether any is left."""
        self.claims = [one for one in self.claims if _is_claimed(one[0])]
        self._spans, self._known = None, 0
        return bool(self.claims)


def _is_claimed(ref: _Ref) -> bool:
    claim = ref()
    return claim is not None and claim.claims


def _by_storage(out: Any) -> dict[int, list[_Extent]]:
    """Where the tensors of ``out`` lie."""
    if isinstance(out, torch.Tensor):
        return {_storage_of(out): [_Extent.of(out)]}
    found: dict[int, list[_Extent]] = {}
    for x in flatten(out)[0]:
        found.setdefault(_storage_of(x), []).append(_Extent.of(x))
    return found


class Claims:
    """All claims, by the storages of what is claimed. Nothing is kept alive here.

    Most claims are over before anybody asks. So one is only noted down, and looked at when somebody does.
    """

    def __init__(self) -> None:
        # Not looked at yet. Appended to without a lock: garbage is collected with anybody's held.
        self._new: list[_Ref] = []
        self._storages: dict[int, _Storage] = {}
        self._most = _FEW
        self._lock = threading.Lock()
        renew(self._lock)

    def add(self, claim: Claim) -> None:
        """Until it is over, what it claims is nobody else's."""
        self._new.append(weakref.ref(claim))

    def _look(self) -> None:
        """Find out where the memory is of those that are new, and not over."""
        while self._new:
            ref = self._new.pop()
            claim = ref()
            if claim is not None and claim.claims:
                for key, extents in _by_storage(claim.out).items():
                    if (storage := self._storages.get(key)) is None:
                        storage = self._storages[key] = _Storage()
                    storage.claims.append((ref, extents))
        if len(self._storages) > self._most:
            self._storages = {key: storage for key, storage in self._storages.items() if storage.forget()}
            self._most = max(_FEW, 2 * len(self._storages))

    def find(self, xs: Iterable[torch.Tensor]) -> Claim | None:
        """A claim on bytes of ``xs`` that is not over."""
        if not (self._new or self._storages):
            return None
        with self._lock:
            if self._new:
                self._look()
            for x in xs if self._storages else ():
                key = _storage_of(x)
                storage = self._storages.get(key)
                if storage is not None:
                    found = storage.find(x)
                    if not storage.claims:
                        del self._storages[key]
                    if found is not None:
                        return found
        return None

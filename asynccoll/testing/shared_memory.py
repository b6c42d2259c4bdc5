"""Memory that simulated ranks share: every access to a word, and every copy, is a switch point.

The memory order is that of x86: stores become visible to other ranks a little later, in order. So a rank's
loads may come before its earlier stores, unless it takes a lock or makes a system call in between. Other
ranks may see a copy half done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from asynccoll.backends.memory.layout import Layout
from asynccoll.backends.memory.region import Region
from asynccoll.testing.primitives import Queue
from asynccoll.testing.scheduler import TICK_SECONDS, running

__all__ = ["Memory", "Parking", "SimulatedRegion"]

#: For how long a store is invisible to other ranks at most: long enough for another rank to look and to fall
#: asleep meanwhile. And the fraction of stores that are visible immediately.
_BUFFERED_SECONDS = 30 * TICK_SECONDS
_SEEN_AT_ONCE = 0.5


def _point() -> None:
    scheduler = running()
    if scheduler is not None:
        scheduler.statement()


class Memory:
    """The memory that the ranks of one lane share in one epoch."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.buffer: bytearray = bytearray(layout.total_bytes)
        self.words: memoryview[int] = memoryview(self.buffer)[: layout.texts].cast("Q")
        #: by offset of a word, in bytes: the threads that sleep until it is woken
        self.sleepers: dict[int, Queue] = {}
        #: by rank, its stores that others do not see yet: from when on they do, the word's index, the value
        self._stored: list[deque[tuple[float, int, int]]] = [deque() for _ in range(layout.size)]

    def fence(self, index: int) -> None:
        """Make all stores of this rank visible now."""
        stored = self._stored[index]
        while stored:
            _, place, value = stored.popleft()
            self.words[place] = value

    def store(self, index: int, place: int, value: int) -> None:
        """Store a word for a rank: others see it now, later, or at the rank's next fence."""
        scheduler, stored = running(), self._stored[index]
        if scheduler is None:
            self.fence(index)
            self.words[place] = value
            return
        assert scheduler.current is not None
        chance = scheduler.chance(scheduler.current.rank)
        late = 0.0 if chance.random() < _SEEN_AT_ONCE else chance.random() * _BUFFERED_SECONDS
        if not stored:
            scheduler.at_fence(partial(self.fence, index))
        stored.append((max(scheduler.now + late, stored[-1][0] if stored else 0.0), place, value))
        self._settle(scheduler.now)

    def load(self, index: int, place: int) -> int:
        """Return the word as this rank sees it, which includes its own stores that others do not see yet."""
        scheduler = running()
        if scheduler is not None:
            self._settle(scheduler.now)
        mine = [value for _, at, value in self._stored[index] if at == place]
        return mine[-1] if mine else self.words[place]

    def _settle(self, now: float) -> None:
        """Make the stores visible whose time has come."""
        for stored in self._stored:
            while stored and stored[0][0] <= now:
                _, place, value = stored.popleft()
                self.words[place] = value


class _Words:
    """The words as one rank sees them."""

    def __init__(self, memory: Memory, index: int) -> None:
        self._memory = memory
        self._index = index

    def __getitem__(self, place: Any) -> Any:
        _point()
        if isinstance(place, slice):
            return self._memory.words[place]
        return self._memory.load(self._index, place)

    def __setitem__(self, place: Any, value: Any) -> None:
        _point()
        if not isinstance(place, slice):
            self._memory.store(self._index, place, value)
            return
        self._memory.fence(self._index)
        for at, one in zip(range(place.start, place.stop), value, strict=True):
            _point()
            self._memory.words[at] = one


class _Slot(torch.Tensor):
    """A part of a slot: every operation on it is a switch point, and so is the middle of a copy."""

    #: called before a write here, to make the rank's earlier stores visible first
    fence: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func.__name__ == "__get__":  # an attribute
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        _point()
        written = kwargs.get("out") if "out" in kwargs else args[0] if func.__name__.endswith("_") else None
        if isinstance(written, _Slot):
            written.fence()
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_ and args[0].dim() == 1:
                return _copied_by_halves(*args)
            return func(*args, **kwargs)


def _copied_by_halves(into: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    half = into.numel() // 2
    into[:half].copy_(of[:half])
    _point()
    into[half:].copy_(of[half:])
    return into


class SimulatedRegion(Region):
    """A region in simulated memory. ``called`` gets the text of each call that this rank posts."""

    def __init__(self, memory: Memory, index: int, called: Callable[[str], object]) -> None:
        super().__init__(memory.buffer, memory.layout, index)
        self._shared = memory
        self._called = called
        words: Any = _Words(memory, index)
        self.words = words

    def _view(self, rank: int, slot: int, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        view = super()._view(rank, slot, dtype, count, offset).as_subclass(_Slot)
        view.fence = partial(self._shared.fence, self.index)
        return view

    def write_text(self, slot: int, text: bytes) -> None:
        self._called(text.decode())
        _point()
        super().write_text(slot, text)

    def text(self, rank: int, slot: int) -> str:
        _point()
        return super().text(rank, slot)


class Parking:
    """Where threads of one rank sleep: a simulated ``backends.memory.parking.Parking``."""

    def __init__(self, memory: Memory, index: int) -> None:
        self._memory = memory
        self._index = index

    def sleep(self, place: int, said: int, seconds: float) -> None:
        scheduler = running()
        assert scheduler is not None
        scheduler.point()
        self._memory.fence(self._index)
        if self._memory.load(self._index, place // 8) == said:
            queue = self._memory.sleepers.setdefault(place, Queue())
            queue.wait(scheduler, scheduler.now + seconds)

    def wake(self, place: int) -> None:
        _point()
        self._memory.fence(self._index)
        if place in self._memory.sleepers:
            self._memory.sleepers[place].let_all_on()

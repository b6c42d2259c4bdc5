"""The memory that one rank lends to the lanes of a host: a nameless file, of which pages are there once used.

Its size is only address space. What lanes may take of it is bounded, and given back when all of their ranks
have left. Nobody can make it smaller under another's feet (it is sealed), and nothing of it is in any file
system.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections import defaultdict
from typing import NamedTuple

from asynccoll.backends.api import forks
from asynccoll.backends.memory.layout import BLOCK_WORDS, LEFT, Layout

__all__ = ["Arena", "map_region"]

PAGE = mmap.PAGESIZE
#: Address space, for lanes in all groups that this rank is the first of.
ARENA_BYTES = 64 << 30
#: What the lanes of a rank's arena may come to; further ones get the smallest slots there are.
MOST_BYTES = 1 << 30

_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


#: What is mapped in this process, by anybody.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def map_region(descriptor: int, offset: int, length: int) -> mmap.mmap:
    """``length`` bytes from ``offset``, on a page; unmapped with the last reference, not there in a child."""
    mapped = mmap.mmap(descriptor, length, mmap.MAP_SHARED, offset=offset)
    _mapped.add(mapped)
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


def _keep_in_child() -> None:
    """Never unmap there: the child may have put something of its own where these are in the parent."""
    forks.keep(*_mapped)


forks.in_child(after_in_child=_keep_in_child)


class _Lent(NamedTuple):
    """A region that ranks may be using."""

    mapping: mmap.mmap
    layout: Layout
    offset: int

    def is_left(self) -> bool:
        """Whether all ranks have left it."""
        words = memoryview(self.mapping)[: self.layout.notes].cast("Q")
        return all(words[rank * BLOCK_WORDS + LEFT] for rank in range(self.layout.size))


class Arena:
    """This rank's own."""

    def __init__(self) -> None:
        self.descriptor: int = os.memfd_create("asynccoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, ARENA_BYTES)
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        self._end = PAGE  # the first one is for nonces
        self._lent: list[_Lent] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets, by length
        self._lock = threading.Lock()

    def lend(self, size: int) -> tuple[int, Layout]:
        """Where a new region for so many ranks is, all zeros, and its layout."""
        with self._lock:
            self._take_back()
            lent = sum(one.layout.total_bytes for one in self._lent)
            layout = Layout.for_size(size)
            if lent + layout.total_bytes > MOST_BYTES:
                layout = Layout.for_size(size, smallest=True)
            length = layout.total_bytes
            offset = self._free[length].pop() if self._free[length] else self._new(length)
            self._lent.append(_Lent(map_region(self.descriptor, offset, length), layout, offset))
            return offset, layout

    def _new(self, length: int) -> int:
        offset = self._end
        self._end += -(-length // PAGE) * PAGE
        return offset

    def take_back(self) -> None:
        """Give back the memory of the regions that all ranks have left."""
        with self._lock:
            self._take_back()

    def _take_back(self) -> None:
        for one in [one for one in self._lent if one.is_left()]:
            one.mapping.madvise(mmap.MADV_REMOVE)
            self._lent.remove(one)
            self._free[one.layout.total_bytes].append(one.offset)

    def close(self) -> None:
        """Its lanes are closed; what others still map of it goes with them."""
        with self._lock:
            self._lent.clear()
            with contextlib.suppress(OSError):
                os.close(self.descriptor)

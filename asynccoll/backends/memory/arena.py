"""The memory that one rank lends to the lanes of its host: a file without a name, in no file system.

The file's size is only address space: the kernel allocates a page when it is first used. How much of it the
lanes may take is bounded, and a lane's memory is given back when all of its ranks have left. The file is
sealed, so that no process can shrink it while others use it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from asynccoll.backends.api import forks, locks
from asynccoll.backends.memory.layout import BLOCK_WORDS, LEFT, Layout

PAGE = mmap.PAGESIZE
#: The address space for the lanes of all groups of which this rank is the first.
ARENA_BYTES = 64 << 30
#: Once the lanes in a rank's arena take this much, further ones get the smallest slots.
MOST_BYTES = 1 << 30

_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


#: All mappings of this process, of any of its ranks.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def map_region(descriptor: int, offset: int, length: int) -> mmap.mmap:
    """Map ``length`` bytes from ``offset``, a multiple of the page size.

    They are unmapped with the last reference. A forked child does not have them.
    """
    mapped = mmap.mmap(descriptor, length, mmap.MAP_SHARED, offset=offset)
    _mapped.add(mapped)
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


def _keep_in_child() -> None:
    """Never unmap these in a child: it may have mapped something of its own at the same addresses."""
    forks.keep(*_mapped)


forks.in_child(after_in_child=_keep_in_child)


class _Lent(NamedTuple):
    """A region that was lent to a lane, and that its ranks may still use."""

    mapping: mmap.mmap
    layout: Layout
    offset: int

    def is_left(self) -> bool:
        """Whether all ranks of the lane have left the region."""
        words = memoryview(self.mapping)[: self.layout.notes].cast("Q")
        return all(words[rank * BLOCK_WORDS + LEFT] for rank in range(self.layout.size))


class Arena:
    """The file of one rank, from which it lends regions to lanes."""

    def __init__(self) -> None:
        #: the file's descriptor; -1 once its number may be another file's
        self.descriptor: int = os.memfd_create("asynccoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, ARENA_BYTES)
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        self._end = PAGE  # the first page is for the words that prove shared memory (``neighbours``)
        self._lent: list[_Lent] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets, by length
        self._lock = locks.Lock()

    def lend(self, size: int) -> tuple[int, Layout]:
        """Lend a new region, all zeros, to ``size`` ranks; return its offset and its layout."""
        with self._lock:
            if self.descriptor < 0:
                raise OSError(errno.EBADF, "this rank has left its world")
            self._give_back([one for one in self._lent if one.is_left()])
            lent = sum(one.layout.total_bytes for one in self._lent)
            layout = Layout.for_size(size)
            if lent + layout.total_bytes > MOST_BYTES:
                layout = Layout.for_size(size, smallest=True)
            length = layout.total_bytes
            offset = self._free[length].pop() if self._free[length] else self._new(length)
            try:
                mapping = map_region(self.descriptor, offset, length)
            except BaseException:
                self._free[length].append(offset)
                raise
            self._lent.append(_Lent(mapping, layout, offset))
            return offset, layout

    def _new(self, length: int) -> int:
        offset = self._end
        self._end += -(-length // PAGE) * PAGE
        return offset

    def withdraw(self, offset: int) -> None:
        """Give back the memory of a region that no other rank has mapped or will map."""
        with self._lock:
            self._give_back([one for one in self._lent if one.offset == offset])

    def _give_back(self, regions: Sequence[_Lent]) -> None:
        for one in regions:
            one.mapping.madvise(mmap.MADV_REMOVE)
            self._lent.remove(one)
            self._free[one.layout.total_bytes].append(one.offset)

    def close(self) -> None:
        """Close the file of an arena that no hub has taken over (a hub closes those of its ranks)."""
        os.close(self.descriptor)

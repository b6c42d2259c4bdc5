"""Compare the calls of ranks that can read each other's memory, before the calls are made.

A *header* is a word for each call of a lane: which call it is, and a running checksum of it and all calls
before it. A rank writes its header, then reads the other ranks' headers of the same call: the one with the
same number since all ranks were last in step. (So if one rank goes on with parts of a call while another
makes the next call, these are compared.) Of two ranks that differ about a call, at least one finds the
other's header, whichever is first, and does not make the call; ranks that do make it agree. No rank waits for
another. This module must not know what a call is: the caller passes its checksum and the number of its text.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from asynccoll import host
from asynccoll.flight import layout
from asynccoll.flight.reading import text_at
from asynccoll.flight.recorder import Recorder
from asynccoll.host.call_number import CHILD

_MASK = layout.HEADERS - 1
_WORDS = layout.HEADER_WORDS
_PLACES = 0x3FFF
_CHILDREN = 0x3F
_PARTS = 0xFFF
_MIX = 0x9E3779B1
_LOW = 0xFFFFFFFF


class Headers:
    """The headers of one lane: this rank's, and those of ``others`` (their recorders' memory, by rank)."""

    def __init__(
        self, recorder: Recorder, number: int, group: str, key: str, others: Mapping[int, memoryview]
    ) -> None:
        self._recorder = recorder
        self._base = max(0, number) * layout.HEADERS * _WORDS
        #: Used if the recorder has no room for this lane; no other rank reads it.
        self._apart = None if number >= 0 else [0] * (layout.HEADERS * _WORDS)
        self._name = layout.joined((group, key))
        self._unmet = dict(others)
        self._met: dict[int, tuple[memoryview, int]] = {}
        self._rings: list[tuple[int, memoryview]] = []
        self._latest = (0, 0)
        #: a checksum of the latest call that was written and of all calls before it
        self.running: int = 0
        self._since = 0  # added to numbers, so that those of headers from before a ``restart`` do not match
        #: how many calls were written since all ranks were in step
        self.count: int = 0
        # A memory fence: taking a lock keeps this processor from reading other headers before its own is
        # written.
        self._fence = host.Lock()

    def restart(self, epoch: int) -> None:
        """Restart the count at the next call: all ranks are in step again, whatever they called before."""
        # Hashed, as epochs count up from 1 and rounds in steps of 1 << 30: few of their low bits differ.
        self.running = self._since = zlib.crc32(epoch.to_bytes(8, "little"))
        self.count = 0
        self._latest = (0, 0)

    def write(self, checksum: int, text: int, place: int, part: int) -> dict[int, tuple[int, int]] | None:
        """Write the header of a call that is about to be made, and compare it with the other ranks'.

        ``text`` is the number of the text of the call and its line (``Recorder.write``). Returns, for each
        rank that called something else, the place and part of the first call about which it differs; None if
        the header was written before (by an earlier step of a program), and nothing was compared.
        """
        before = self._latest
        if (place, part) == before:
            return None
        self._latest = place, part
        self.count += 1
        which = _which(place, part)
        running = self.running = ((self.running ^ checksum) * _MIX + which + place // CHILD) & _LOW
        word = which << 32 | running
        at = (self.count & _MASK) * _WORDS
        mine = self._apart or self._recorder.headers
        mine[self._base + at] = 0  # invalidate the header of the previous lap before its number changes
        number = self.count + self._since & _LOW
        mine[self._base + at + 1] = number << 32 | text
        mine[self._base + at] = word
        with self._fence:
            pass
        if self._unmet:
            self._meet()
        found = {}
        for rank, ring in self._rings:
            theirs = ring[at]
            # 0: not written yet, or being written just now: that rank will then look at this one.
            if theirs == word or not theirs:
                continue
            if ring[at + 1] >> 32 != number or ring[at] != theirs:
                continue  # from another lap of the ring, or being written just now
            begins = self._begins(theirs >> 32, place, part, before)
            if begins is not None and self._is_met(rank):
                found[rank] = begins
        return found

    @staticmethod
    def _begins(theirs: int, place: int, part: int, before: tuple[int, int]) -> tuple[int, int] | None:
        """Return the first call on which the ranks differ, or None; the other has ``theirs`` (``_which``)."""
        if theirs == _which(place, part):
            return place, part
        other = (before[0], before[1] + 1) if part == 1 else (place + 1, 1)
        if theirs == _which(*other):
            return other
        # By how many child tasks that rank is ahead; a number in the upper half means that this rank is.
        ahead = (theirs >> 26) - place // CHILD & _CHILDREN
        if not ahead or ahead <= _CHILDREN // 2:
            return (place, part) if ahead else None
        child = place // CHILD + ahead - _CHILDREN - 1
        if before[0] // CHILD == child and before[0]:
            return before[0] + 1, 1
        return child * CHILD + (theirs >> 12 & _PLACES), theirs & _PARTS

    def text(self, rank: int) -> str:
        """Return the text of ``rank`` for the latest call that was written here; "" if it cannot be read."""
        memory, number = self._met[rank]
        text = _ring(memory, number)[(self.count & _MASK) * _WORDS + 1] & _LOW
        return text_at(memory, text)

    def _meet(self) -> None:
        """Find the lane in the memory of ranks that had not opened it before."""
        for rank, memory in list(self._unmet.items()):
            number = _number(memory, self._name)
            if number is not None:
                del self._unmet[rank]
                self._met[rank] = memory, number
                self._rings.append((rank, _ring(memory, number)))

    def _is_met(self, rank: int) -> bool:
        """Whether that ring is still this lane's: a rank that closed the lane may reuse the ring."""
        memory, number = self._met[rank]
        if _number(memory, self._name) == number:
            return True
        self._rings = [one for one in self._rings if one[0] != rank]
        return False


def _which(place: int, part: int) -> int:
    child = place // CHILD & _CHILDREN
    return child << 26 | (place & _PLACES) << 12 | (part & _PARTS)


def _ring(memory: memoryview, number: int) -> memoryview:
    first = layout.HEADERS_AT + number * layout.HEADERS * _WORDS * 8
    return memory[first : first + layout.HEADERS * _WORDS * 8].cast("Q")


def _number(memory: memoryview, name: bytes) -> int | None:
    """Return the row of the table of lanes that has this name, or None."""
    table = bytes(memory[layout.LANES_AT : layout.RECORDS_AT])
    rows = (row for row in range(layout.LANES) if table.startswith(name, row * layout.LANE.size + _NAME_AT))
    for row in rows:
        _, length, text = layout.LANE.unpack_from(table, row * layout.LANE.size)
        if text[:length] == name:
            return row
    return None


_NAME_AT = 10  # after the place and the length

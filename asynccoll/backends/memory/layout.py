"""Where everything is in the memory that the ranks of one lane share.

A region begins with the control block of each rank. Then follow a note of each rank for each slot (the
lengths of parts, or what a message is), a line of text of each rank for the call in each slot, and the slots,
which hold data for the other ranks to read. Each word is written by one rank, except ``ASLEEP`` and
``WATCHING``, which a rank that rings clears. Words that different ranks write never share a cache line.

A *step* is one use of a slot: step ``s`` uses slot ``s % SLOTS`` of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Steps that a rank may be ahead of the slowest reader; as many words as a cache line has.
SLOTS = 8
_LINE_WORDS = 8

# The control block of a rank, in words of 64 bits from its beginning.
#: by slot: step << 32 | checksum of the call, once the rank's data is there
POSTED = 0
#: by slot: the step, once the rank's part of a reduction is there
COMBINED = _LINE_WORDS
#: the last step of which the rank has read all others' data
READ = 2 * _LINE_WORDS
#: by slot: how many steps the rank needs for the call, if ranks may need different numbers
LENGTHS = 3 * _LINE_WORDS
#: not 0 while a thread of the rank sleeps until it is woken
ASLEEP = 4 * _LINE_WORDS
#: not 0 while the rank's watcher is to be rung
WATCHING = ASLEEP + 1
#: 0, or how the rank has left: CLOSED or ABORTED
STATE = 5 * _LINE_WORDS
#: not 0 once the rank writes nothing more; when all have left, the memory may be lent to another lane
LEFT = STATE + 1
#: by slot: the place of the call (its number in the lane's order) << 1 | whether several parts share it
PLACES = 6 * _LINE_WORDS
BLOCK_WORDS = 8 * _LINE_WORDS

CLOSED, ABORTED = 1, 2

#: The length of the text that says what a call is and where it was made, for errors about differing ranks.
TEXT_BYTES = 2048

_PAGE = 4096
_LARGEST_SLOT = 512 << 10
#: Up to this fraction of a slot, another round in which each rank reduces a part costs more than it saves.
_BY_PARTS = 1 / 8
#: All slots of a region take at most this much, unless a page for each slot is more.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of a region, the same for all of its ranks."""

    size: int
    slot_bytes: int

    @classmethod
    def for_size(cls, size: int, *, smallest: bool = False) -> Layout:
        """Return the layout for ``size`` ranks: the usual one, or the ``smallest`` if memory is scarce."""
        share = _MOST_BYTES // (SLOTS * size)
        return cls(size, _PAGE if smallest else max(_PAGE, min(_LARGEST_SLOT, share // _PAGE * _PAGE)))

    @property
    def by_parts_bytes(self) -> int:
        """The size of a tensor above which ranks, if more than two, reduce a part each; at most 64 KiB."""
        return int(self.slot_bytes * _BY_PARTS)

    @property
    def notes(self) -> int:
        """Where the notes begin, in bytes. They are ordered by slot, then by rank."""
        return self.size * BLOCK_WORDS * 8

    @property
    def notes_words(self) -> int:
        """How many words the notes for one slot have: each rank's note has two words for each rank."""
        return self.size * 2 * self.size

    @property
    def texts(self) -> int:
        """Where the texts begin, in bytes."""
        return self.notes + SLOTS * self.notes_words * 8

    @property
    def slots(self) -> int:
        """Where the slots begin, in bytes: at a multiple of the page size."""
        end = self.texts + self.size * SLOTS * TEXT_BYTES
        return -(-end // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        return self.slots + self.size * SLOTS * self.slot_bytes

    def text(self, rank: int, slot: int) -> int:
        """Return where the text of a rank's call in that slot begins, in bytes."""
        return self.texts + (rank * SLOTS + slot) * TEXT_BYTES

    def slot(self, rank: int, slot: int) -> int:
        """Return where a rank's slot begins, in bytes."""
        return self.slots + (rank * SLOTS + slot) * self.slot_bytes

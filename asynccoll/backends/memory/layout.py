"""Where everything is in the memory that the ranks of one lane share.

A region begins with the control block of each rank. Then come, for each slot, a note of each rank (of the
lengths of parts, or of a message), and a line of text for each call that a rank has posted; then the slots,
in which data lies for the others to read. Each word has one rank that writes it, but for ``ASLEEP`` and
``WATCHING``, which the rank that rings clears; words that different ranks write never share a cache line.

A *step* is one use of a slot: step ``s`` uses slot ``s % SLOTS`` of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ABORTED",
    "ASLEEP",
    "BLOCK_WORDS",
    "CLOSED",
    "COMBINED",
    "LEFT",
    "LENGTHS",
    "PLACES",
    "POSTED",
    "READ",
    "SLOTS",
    "STATE",
    "TEXT_BYTES",
    "WATCHING",
    "Layout",
]

#: Steps that a rank may be ahead of the slowest reader; as many words as a cache line has.
SLOTS = 8
_LINE_WORDS = 8

# The control block of a rank, in words of 64 bits from its beginning.
#: by slot: step << 32 | checksum of the call, once the rank's data is there
POSTED = 0
#: by slot: the step, once the rank's part of a reduction is there
COMBINED = _LINE_WORDS
#: the steps that the rank has read, of all others
READ = 2 * _LINE_WORDS
#: by slot: how many steps the rank needs for the call, where ranks need not agree on that before
LENGTHS = 3 * _LINE_WORDS
#: a thread of the rank sleeps until it is woken; below it: its watcher is to be rung
ASLEEP = 4 * _LINE_WORDS
WATCHING = ASLEEP + 1
#: whether the rank has left, and how
STATE = 5 * _LINE_WORDS
#: not 0 once it writes nothing there any more: the memory may be another lane's when all have left
LEFT = STATE + 1
#: by slot: the place of the call in the lane's order << 1 | whether parts share it
PLACES = 6 * _LINE_WORDS
BLOCK_WORDS = 8 * _LINE_WORDS

CLOSED, ABORTED = 1, 2

#: What a call is and where it was made, for the error that shows both sides.
TEXT_BYTES = 512

_PAGE = 4096
_LARGEST_SLOT = 512 << 10
#: Of a slot: up to so much, one more round costs more than it saves that ranks reduce a part each.
_BY_PARTS = 1 / 8
#: All slots of a region take at most so much, however many ranks there are.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of a region: all of its members have the same."""

    size: int
    slot_bytes: int

    @classmethod
    def for_size(cls, size: int, *, smallest: bool = False) -> Layout:
        """The usual one for so many ranks; the smallest where memory is scarce."""
        share = _MOST_BYTES // (SLOTS * size)
        return cls(size, _PAGE if smallest else max(_PAGE, min(_LARGEST_SLOT, share // _PAGE * _PAGE)))

    @property
    def by_parts_bytes(self) -> int:
        """With more bytes than this, more than two ranks reduce a part each: 64 KiB in the largest slots."""
        return int(self.slot_bytes * _BY_PARTS)

    @property
    def notes(self) -> int:
        """Where the notes begin, in bytes: by slot, by rank, two words for each rank."""
        return self.size * BLOCK_WORDS * 8

    @property
    def notes_words(self) -> int:
        """How many words they have for each slot."""
        return self.size * 2 * self.size

    @property
    def texts(self) -> int:
        """Where the texts begin, in bytes."""
        return self.notes + SLOTS * self.notes_words * 8

    @property
    def slots(self) -> int:
        """Where the slots begin, in bytes: on a page."""
        end = self.texts + self.size * SLOTS * TEXT_BYTES
        return -(-end // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        return self.slots + self.size * SLOTS * self.slot_bytes

    def text(self, rank: int, slot: int) -> int:
        """Where the text of a rank's call begins, in bytes."""
        return self.texts + (rank * SLOTS + slot) * TEXT_BYTES

    def slot(self, rank: int, slot: int) -> int:
        """Where a slot of a rank begins, in bytes."""
        return self.slots + (rank * SLOTS + slot) * self.slot_bytes

"""Record each operation of a rank, as cheaply as possible, since this happens in every call.

Operations of one kind (lane, name, dtype, shape, line) share a text, which is written once; each operation
gets a record of numbers, written by one ``pack``. The text is composed only for the first operation of its
kind. This module must not know what a lane or an operation is: the caller passes what is to be recorded.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

from asynccoll import host
from asynccoll.flight import layout
from asynccoll.flight.layout import (
    BEGUN,
    ENDED,
    GIVEN_UP,
    OUTCOME,
    RECORD,
    RECORDS,
    RECORDS_AT,
    REFUSED,
    WAITED,
    WORDS,
)
from asynccoll.host import shared_memory
from asynccoll.host.words import shortened

_SLOT = RECORD.size
_MASK = RECORDS - 1
_LANE_WORDS = layout.LANE.size // 8
_pack = RECORD.pack_into
#: For how many kinds of operations the text's number is remembered; shapes may change in every step.
_MOST_KINDS = RECORDS
#: How many characters are recorded of the error that a rank died of; the rest is in its log.
_WHY_CHARACTERS = 300


class Recorder:
    """The last operations of this rank, in memory that other processes can read. Any thread may write."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._head = (rank, world_size, host.getpid())
        self._memory = shared_memory.Memory(layout.SIZE_BYTES, layout.NAME)
        self._use(self._memory.buffer)
        self._tickets = count(1).__next__
        #: the ticket of the latest operation
        self.newest: int = 0
        #: The numbers of the texts already written, by the key of their kind of operation.
        self.texts: dict[Hashable, int] = {}
        self._pinned: list[object] = []
        self._written = 0  # where the latest text ends
        self._lanes = 0
        self._free: deque[int] = deque()  # the rows of closed lanes, in the order of closing
        self._lock = host.Lock()
        self._said: dict[str, object] = {}
        self._begin()

    def _use(self, buffer: Any) -> None:
        self._buffer = buffer
        words = memoryview(buffer)[RECORDS_AT : RECORDS_AT + RECORDS * _SLOT]
        self._seconds = words.cast("d")
        self._numbers = words.cast("Q")
        self._places = memoryview(buffer)[layout.LANES_AT : RECORDS_AT].cast("Q")
        #: The headers of all lanes, one ring after another (``Headers``).
        self.headers: memoryview[int] = memoryview(buffer)[layout.HEADERS_AT : layout.TEXTS_AT].cast("Q")

    def _begin(self) -> None:
        began, wall = host.monotonic(), host.wall_clock()
        layout.ENDING.pack_into(self._buffer, layout.ENDING_AT, 0.0, 0, layout.NO_CODE)
        layout.HEADER.pack_into(self._buffer, 0, layout.MAGIC, layout.VERSION, *self._head, began, wall)

    @property
    def descriptor(self) -> int:
        """The file descriptor by which other processes of this host open the memory; -1 if they cannot."""
        return self._memory.descriptor

    @property
    def buffer(self) -> memoryview:
        """The memory, for ``read``."""
        return memoryview(self._buffer)

    # Who it is

    def say(self, **said: object) -> None:
        """Add ``said`` (JSON values) to what the rank says about itself, which is read with the records."""
        self._said |= said
        text = json.dumps(self._said).encode()
        if layout.SAID_AT + layout.LENGTH.size + len(text) <= layout.HEADER_BYTES:
            start = layout.SAID_AT + layout.LENGTH.size
            layout.LENGTH.pack_into(self._buffer, layout.SAID_AT, 0)
            self._buffer[start : start + len(text)] = text
            layout.LENGTH.pack_into(self._buffer, layout.SAID_AT, len(text))

    def lane(self, group: str, key: str) -> int:
        """Take a row in the table of lanes for the lane of ``group`` with this ``key``.

        Returns the row's number, or -1 if none is free.
        """
        said = layout.joined((group, key))
        with self._lock:
            if self._lanes < layout.LANES:
                number = self._lanes
                self._lanes += 1
            elif self._free:
                number = self._free.popleft()
                size = layout.HEADERS * layout.HEADER_WORDS * 8
                first = layout.HEADERS_AT + number * size
                self._buffer[first : first + size] = bytes(size)
            else:
                return -1
            layout.LANE.pack_into(
                self._buffer, layout.LANES_AT + number * layout.LANE.size, 0, len(said), said
            )
            return number

    def forget_lane(self, number: int) -> None:
        """Free the row of a lane that was closed; it can be read until another lane needs it."""
        if number >= 0:
            with self._lock:
                self._free.append(number)

    # Operations

    def note(
        self,
        text: int,
        lane: int,
        place: int,
        part: int,
        peer: int,
        size_bytes: int,
        called: float,
        begun: float,
    ) -> int:
        """Record an operation. Returns its ticket, with which later events are recorded.

        ``text`` is the number of its kind's text, from ``texts`` or ``learn``; ``begun`` is 0.0 if queued.
        """
        ticket = self.newest = self._tickets()
        _pack(
            self._buffer, RECORDS_AT + (ticket & _MASK) * _SLOT,
            ticket, text, place, part, peer, size_bytes, called, begun, 0.0, 0.0, 0, ticket,
        )  # fmt: skip
        if place and lane >= 0:
            self._places[lane * _LANE_WORDS] = place
        return ticket

    def withdraw(self, ticket: int, lane: int, place: int) -> None:
        """Delete the record of an operation that was not accepted; ``place`` is its lane's latest again."""
        if self.newest - ticket < RECORDS:
            self._numbers[(ticket & _MASK) * WORDS] = 0
        if lane >= 0:
            self._places[lane * _LANE_WORDS] = place

    def begun(self, ticket: int, now: float) -> None:
        """Record that a queued operation is being issued at ``now``; 0.0: that it is queued after all."""
        self._stamp(ticket, BEGUN, now)

    def ended(self, ticket: int, now: float) -> None:
        """Record that the operation was seen to end."""
        if self.newest - ticket < RECORDS:
            self._seconds[(ticket & _MASK) * WORDS + ENDED] = now

    def waited(self, ticket: int, now: float) -> None:
        """Record that a waiter waits for the operation."""
        self._stamp(ticket, WAITED, now)

    def polled(self, ticket: int, now: float) -> None:
        """Record that the program has asked whether the operation is over, and that it is not."""
        if self.newest - ticket < RECORDS and self._seconds[(ticket & _MASK) * WORDS + ENDED] <= 0:
            self._stamp(ticket, ENDED, -now)

    def timed_out(self, ticket: int, now: float) -> None:
        """Record that the wait for the operation timed out, while it is still in flight."""
        self._stamp(ticket, WAITED, -now)

    def given_up(self, ticket: int) -> None:
        """Record that the waiter was cancelled, unless the wait timed out before, which says more."""
        if self.newest - ticket < RECORDS and self._seconds[(ticket & _MASK) * WORDS + WAITED] > 0:
            self._stamp(ticket, WAITED, GIVEN_UP)

    def failed(self, ticket: int, why: str, now: float) -> None:
        """Record that the operation has failed, and why."""
        if self.newest - ticket < RECORDS:
            said = shortened(why, layout.TEXT_BYTES).encode(errors="replace")
            self._numbers[(ticket & _MASK) * WORDS + OUTCOME] = self._write(said[: layout.TEXT_BYTES])
        self._stamp(ticket, ENDED, now)

    def refused(self, ticket: int, why: str, now: float) -> None:
        """Record that this rank refuses the call, and why; nothing of it was sent."""
        self._stamp(ticket, WAITED, REFUSED)
        self.failed(ticket, why.partition("\n")[0], now)

    def _stamp(self, ticket: int, word: int, now: float) -> None:
        if self.newest - ticket < RECORDS:
            self._seconds[(ticket & _MASK) * WORDS + word] = now

    # Texts

    def learn(self, key: Hashable, parts: Sequence[str], pinned: object) -> int:
        """Write the text of a kind of operation, store its number in ``texts`` under ``key``, and return it.

        ``parts``: see ``layout.PARTS``. ``pinned`` is kept alive as long as the key: objects whose ids are in
        the key must be in it.
        """
        number = self.texts[key] = self.write(layout.joined(parts), pinned)
        return number

    def write(self, said: bytes, pinned: object) -> int:
        """Write a text. Returns its number; that and ``pinned`` are kept until ``texts`` is cleared."""
        number = self._write(said[: layout.TEXT_BYTES])
        self._pinned.append(pinned)
        return number

    def _write(self, said: bytes) -> int:
        """Write a text. Returns its number, which is never 0."""
        size = layout.LENGTH.size + len(said)
        with self._lock:
            if len(self._pinned) >= _MOST_KINDS:
                self._forget()
            start = max(self._written, 8)
            half = start // layout.HALF_BYTES
            if start + size >= (half + 1) * layout.HALF_BYTES:  # continue in the other half, overwriting it
                start = 8 if half else layout.HALF_BYTES
                self._forget()
            at = layout.TEXTS_AT + start
            layout.LENGTH.pack_into(self._buffer, at, len(said))
            self._buffer[at + layout.LENGTH.size : at + size] = said
            self._written = start + size
        return start

    def _forget(self) -> None:
        """Forget which texts are written: a kind of operation that occurs again gets another number."""
        self.texts.clear()
        self._pinned.clear()

    # The end

    def end(self, how: str, why: str = "", code: int | None = None) -> None:
        """Record that this rank leaves its world: ``how`` (``layout.ENDINGS``), and ``why`` if with an error.

        Only the first call counts: a program that dies also leaves its world, as a consequence.
        """
        if layout.ENDING.unpack_from(self._buffer, layout.ENDING_AT)[1]:
            return
        if why:
            self.say(why=shortened(why, _WHY_CHARACTERS))
        mark_ended(self._buffer, how, code, host.monotonic())

    def close(self) -> None:
        """Close the memory; what is recorded from now on cannot be read by others."""
        memory, self._memory = self._memory, shared_memory.Memory(layout.SIZE_BYTES)
        before = (self._seconds, self._numbers, self._places, self.headers)
        self._use(self._memory.buffer)
        for view in before:
            view.release()
        memory.close()

    def disown(self) -> None:
        """In a forked child, stop using the memory: it is the parent's, which goes on writing."""
        self._lock = host.Lock()
        self.close()


def mark_ended(memory: Any, how: str, code: int | None, now: float) -> None:
    """Write into a recorder's ``memory`` that its rank has ended; also done by its launcher."""
    known = layout.NO_CODE if code is None else code
    layout.ENDING.pack_into(memory, layout.ENDING_AT, now, layout.ENDINGS.index(how), known)

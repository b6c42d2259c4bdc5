"""Messages between two ranks through memory that they share: any number, in the order of their tag alone.

Each rank has a ring of records for the other to read: the slots of their region, with a note beside each.

- ``SENT``: there is a message, with this number, tag, dtype and length. A short one lies in the slot.
- ``WANTED``: a receive has been matched with a message of which more is needed than was there.
- ``PART``: the next part of what was wanted.
- ``TAKEN``: a message has arrived, and its sender is rid of it.

Records are read as they come, whether somebody waits for what they are about or not: so no tag waits for
another. Long messages stay with their sender until they are wanted, and of short ones a bounded number lies
with a receiver that has not asked for them.

**What makes it sound.** Every word has one writer; a record is committed by one store, of its step. What
is posted next stands in ``_record`` before anything of it is written, and until what it says is noted here:
after an interrupt, which may strike anywhere, that is finished first. A record is said to be read once all
that it asks for is done, and all of that can be done once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import NamedTuple

import torch

from asynccoll.backends.api import DTYPES_BY_NAME, SHORTEST_NAP_SECONDS, Completion, host, unlike
from asynccoll.backends.memory.flight import InFlight
from asynccoll.backends.memory.layout import POSTED, READ, SLOTS
from asynccoll.backends.memory.moving import Bells, Mover
from asynccoll.backends.memory.region import Region
from asynccoll.errors import CollectiveError, PeerRefusedError

__all__ = ["Incoming", "Outgoing", "Pair"]

_SENT, _WANTED, _PART, _TAKEN = range(1, 5)
#: In place of a dtype: what was sent is the reason why there is no message.
_REFUSED = 255
_NAMES = sorted(DTYPES_BY_NAME)
_CODES = {DTYPES_BY_NAME[name]: code for code, name in enumerate(_NAMES)}
#: How many messages of one tag the receiver knows of, of those that it has not taken.
_MOST_ANNOUNCED = 16
#: How many short messages may lie with the receiver, each of a slot's size at most.
_MOST_LYING = 16
#: How many parts are put ahead of the reader: further, they leave the cache.
_AHEAD = 3
_SAYS = b"send"


class Outgoing(InFlight):
    """A message that is sent."""

    __slots__ = ("announced", "code", "data", "moved", "number", "tag")

    def __init__(self, pair: Pair, data: torch.Tensor, code: int, tag: int, number: int) -> None:
        super().__init__(pair)
        self.data: torch.Tensor = data
        self.code: int = code
        self.tag: int = tag
        self.number: int = number
        #: the receiver knows of it
        self.announced: bool = False
        #: so many bytes are posted, of one that was wanted
        self.moved: int = 0


class Incoming(InFlight):
    """A message that is received, into ``data``."""

    __slots__ = ("code", "data", "number", "tag")

    def __init__(self, pair: Pair, data: torch.Tensor, code: int, tag: int, number: int) -> None:
        super().__init__(pair)
        self.data: torch.Tensor = data
        self.code: int = code
        self.tag: int = tag
        self.number: int = number


class _Letter:
    """A message that has been announced, and is not matched."""

    __slots__ = ("code", "data", "number", "reader", "size")

    def __init__(self, number: int, code: int, size: int, data: torch.Tensor | None) -> None:
        """``data``: of a short one, in its slot or where it was kept."""
        self.number = number
        self.code = code
        self.size = size
        self.data = data
        self.reader: Incoming | None = None


class _Record(NamedTuple):
    """What is posted next."""

    step: int
    kind: int
    number: int
    message: Outgoing | None
    note: tuple[int, int, int, int]
    data: torch.Tensor | None


class Pair(Mover):
    """The messages of one rank with one other."""

    def __init__(
        self,
        region: Region,
        bells: Bells,
        where: str,
        ranks: Sequence[int],
        died: Callable[[], Sequence[int]],
    ) -> None:
        """``died``: the ranks of the lane with which it is lost, whosever messages these are."""
        super().__init__(region, bells, where, ranks)
        self._died = died
        self._theirs = region.others[0]
        self._other = 1 - region.index
        self._posted: int = 0
        self._knocked: int = 0
        self._numbers = count(1)
        self._record: _Record | None = None
        self._sent: dict[int, Outgoing] = {}  # not taken
        self._lines: dict[int, dict[int, Outgoing]] = {}  # the same by tag, in order
        self._announcing: dict[int, Outgoing] = {}
        self._lying: dict[int, None] = {}  # those that lie whole with the receiver
        self._streaming: dict[int, Outgoing] = {}  # wanted, and not posted whole
        self._answers: dict[tuple[int, int], None] = {}  # WANTED and TAKEN, by number
        self._readers: dict[int, dict[int, Incoming]] = {}  # by tag: what waits for a message
        self._letters: dict[int, dict[int, _Letter]] = {}  # by tag: what nobody waits for
        self._taking: dict[int, Incoming] = {}  # wanted here
        self._unmatched: dict[int, None] = {}  # tags that are to be looked at

    # Issuing

    def send(self, x: torch.Tensor, tag: int) -> Completion:
        """``x``, flat; over when the other rank has taken it."""
        return self._send(_bytes_of(x), _CODES[x.dtype], tag)

    def recv(self, x: torch.Tensor, tag: int) -> Completion:
        """Into ``x``, flat."""
        message = Incoming(self, _bytes_of(x), _CODES[x.dtype], tag, next(self._numbers))
        return self._begin(message, partial(self._ask, message))

    def refuse(self, tag: int, why: str) -> Completion:
        """In place of a send: tell the receiver so."""
        text = bytearray(why.encode()[: self.region.layout.slot_bytes])
        return self._send(torch.frombuffer(text, dtype=torch.uint8), _REFUSED, tag)

    def _send(self, data: torch.Tensor, code: int, tag: int) -> Completion:
        message = Outgoing(self, data, code, tag, next(self._numbers))
        return self._begin(message, partial(self._line_up, message))

    def _begin(self, message: InFlight, enter: Callable[[], object]) -> Completion:
        if not self._watched:  # the other rank may ring for this one from now on
            self._be_known()
        try:
            with self._lock:
                if self._broken is not None:
                    message.end(self._broken)
                    return message
                enter()
                moved = self._move()
                for _ in range(SLOTS):
                    if not self._has_come():
                        break
                    moved = self._move() or moved
            if moved:
                self._tell_others()
            if self._untold:
                self._bells.ring(self.region.index)
            elif self._is_busy():
                self._watch_if_needed()
        except BaseException:
            self._leave_to_watcher()
            raise
        return message

    def _line_up(self, message: Outgoing) -> None:
        """Send it after those of its tag."""
        line = self._lines.setdefault(message.tag, {})
        into = [self._sent, line]
        if len(line) < _MOST_ANNOUNCED:
            into.append(self._announcing)
        # Within one call of C, so that an interrupt leaves it in all or in none.
        any(map(dict.__setitem__, into, repeat(message.number), repeat(message)))

    def _ask(self, message: Incoming) -> None:
        """Receive it after those of its tag."""
        self._unmatched[message.tag] = None
        self._readers.setdefault(message.tag, {})[message.number] = message

    # What moves

    def _is_busy(self) -> bool:
        return bool(self._sent or self._readers or self._taking or self._answers)

    def _goes_on_by_itself(self) -> bool:
        """What lies whole with the receiver moves nobody but who waits for it."""
        return bool(
            self._listened
            or self._readers
            or self._taking
            or self._answers
            or len(self._sent) > len(self._lying)
        )

    def _step(self) -> bool:
        if self._broken is not None:
            return False
        taken = self._take()
        while self._unmatched:
            tag = next(iter(self._unmatched))
            self._match(tag)
            self._unmatched.pop(tag, None)
        return self._post() or taken

    # Posting

    def _post(self) -> bool:
        """Post what there is to post, as far as there is room; whether there was anything."""
        words, posted = self._words, False
        while (record := self._record or self._next()) is not None:
            self._record = record
            slot = record.step % SLOTS
            if words[self._mine + POSTED + slot] != record.step:
                self.region.write_note(slot, record.note)
                if record.data is not None:
                    self._slot(self.region.index, slot, record.data.numel()).copy_(record.data)
                words[self._mine + POSTED + slot] = record.step
            self._was_posted(record)
            self._posted = record.step
            self._record = None
            posted = True
        return posted

    def _next(self) -> _Record | None:
        """What is to be posted next; None if there is nothing, or no room."""
        if not (self._answers or self._announcing or self._streaming):
            return None
        step = self._posted + 1
        unread = step - self._words[self._theirs + READ]
        if unread > SLOTS:
            self._knock()
            return None
        if self._answers:
            kind, number = next(iter(self._answers))
            return _Record(step, kind, number, None, (kind, number, 0, 0), None)
        if self._announcing:
            return self._announcement(step, next(iter(self._announcing.values())))
        if self._streaming and unread <= _AHEAD:
            return self._part(step, next(iter(self._streaming.values())))
        return None

    def _knock(self) -> None:
        """Have the other rank read, once: it need not look, if what it has sent lies here whole."""
        if self._answers and self._knocked != self._posted:
            self._knocked = self._posted
            self._bells.ring(self._other)

    def _announcement(self, step: int, message: Outgoing) -> _Record:
        self.region.write_text(step % SLOTS, _SAYS)
        size = message.data.numel()
        refused = message.code == _REFUSED
        lies = size <= self.region.layout.slot_bytes and (refused or len(self._lying) < _MOST_LYING)
        kind = _SENT | message.code << 8 | message.tag << 32
        note = kind, message.number, size, int(lies)
        return _Record(step, _SENT, message.number, message, note, message.data if lies else None)

    def _part(self, step: int, message: Outgoing) -> _Record:
        size = min(self.region.layout.slot_bytes, message.data.numel() - message.moved)
        data = message.data.narrow(0, message.moved, size)
        note = _PART, message.number, size, message.moved
        return _Record(step, _PART, message.number, message, note, data)

    def _was_posted(self, record: _Record) -> None:
        """Note what the other rank has been told."""
        message = record.message
        if message is None:
            self._answers.pop((record.kind, record.number), None)
        elif record.kind == _SENT:
            message.announced = True
            if record.data is not None:
                self._lying[record.number] = None
            self._announcing.pop(record.number, None)
        else:
            message.moved = record.note[3] + record.note[2]
            if message.moved == message.data.numel():
                self._streaming.pop(record.number, None)

    def _slot(self, rank: int, slot: int, size: int) -> torch.Tensor:
        return self.region.views(slot, torch.uint8, size)[rank]

    # Reading

    def _has_come(self) -> bool:
        """Whether there is a record to read."""
        step = self._words[self._mine + READ] + 1
        return bool(self._words[self._theirs + POSTED + step % SLOTS] == step)

    def _take(self) -> bool:
        """Read one record; whether there was one."""
        words = self._words
        step = words[self._mine + READ] + 1
        slot = step % SLOTS
        if words[self._theirs + POSTED + slot] != step:
            return False
        what, number, size, more = self.region.note(self._other, slot)
        kind = what & 255
        if kind == _SENT:
            data = self._slot(self._other, slot, size) if more else None
            self._announced(number, what >> 8 & 255, what >> 32, size, data)
        elif kind == _PART:
            self._more(number, more, self._slot(self._other, slot, size))
        elif kind == _TAKEN:
            self._was_taken(number)
        elif (message := self._sent.get(number)) is not None:
            self._streaming[number] = message
        words[self._mine + READ] = step
        return True

    def _announced(self, number: int, code: int, tag: int, size: int, data: torch.Tensor | None) -> None:
        """The other rank sends a message, and this is its data if it is short."""
        letter = self._letters.get(tag, {}).get(number)
        if letter is None:
            if number in self._taking or (_TAKEN, number) in self._answers:
                return  # it was done with when an interrupt came
            letter = _Letter(number, code, size, data)
            self._letters.setdefault(tag, {})[number] = letter
        self._match(tag)
        if letter.data is not None and number in self._letters.get(tag, {}):
            letter.data = letter.data.clone()

    def _match(self, tag: int) -> None:
        """Give the receives of a tag the messages that have come, in order."""
        letters, readers = self._letters.get(tag, {}), self._readers.get(tag, {})
        while letters:
            letter = next(iter(letters.values()))
            if letter.reader is None:
                if not readers:
                    break
                letter.reader = next(iter(readers.values()))
            self._deliver(letter, letter.reader)
            readers.pop(letter.reader.number, None)
            letters.pop(letter.number, None)
        if not letters:
            self._letters.pop(tag, None)
        if not readers:
            self._readers.pop(tag, None)

    def _deliver(self, letter: _Letter, reader: Incoming) -> None:
        into = reader.data
        if letter.code != reader.code or letter.size != into.numel():
            self._done_with(letter.number, reader, self._misfit(letter, reader))
        elif letter.data is None:
            self._taking[letter.number] = reader
            self._answers[_WANTED, letter.number] = None
        else:
            into.copy_(letter.data)
            self._done_with(letter.number, reader, None)

    def _misfit(self, letter: _Letter, reader: Incoming) -> CollectiveError:
        """Why that message is none that the receive could take."""
        if letter.code == _REFUSED:
            assert letter.data is not None
            return PeerRefusedError(bytes(letter.data.numpy()).decode(errors="replace"))
        sent, wanted = DTYPES_BY_NAME[_NAMES[letter.code]], DTYPES_BY_NAME[_NAMES[reader.code]]
        return unlike(
            letter.size // sent.itemsize,
            sent,
            reader.data.numel() // wanted.itemsize,
            wanted,
        )

    def _more(self, number: int, start: int, data: torch.Tensor) -> None:
        """A part of a message that this rank wants."""
        reader = self._taking.get(number)
        if reader is None:
            return  # it was done with when an interrupt came
        end = start + data.numel()
        reader.data.narrow(0, start, data.numel()).copy_(data)
        if end == reader.data.numel():
            self._done_with(number, reader, None)
            self._taking.pop(number, None)

    def _done_with(self, number: int, reader: Incoming, error: CollectiveError | None) -> None:
        self._answers[_TAKEN, number] = None
        self._over(reader, error)

    def _was_taken(self, number: int) -> None:
        message = self._sent.get(number)
        if message is None:
            return
        self._over(message, None)
        line = self._lines.get(message.tag, {})
        line.pop(number, None)
        if not line:
            self._lines.pop(message.tag, None)
        for one in islice(line.values(), _MOST_ANNOUNCED):
            if not one.announced:
                self._announcing[one.number] = one
        self._lying.pop(number, None)
        self._sent.pop(number, None)

    # Ends

    def flush(self, seconds: float) -> None:
        """Say of all that was taken here that it was, before this rank leaves: its sender waits for that."""
        deadline = host.monotonic() + seconds
        while self._answers and not self._gone() and host.monotonic() < deadline:
            if not self._move_on():
                host.sleep(SHORTEST_NAP_SECONDS)

    def _gone(self) -> list[int]:
        return sorted({*super()._gone(), *self._died()})

    def _drop(self, error: CollectiveError) -> None:
        readers = [one for line in self._readers.values() for one in line.values()]
        for message in (*self._sent.values(), *readers, *self._taking.values()):
            self._over(message, error)
        for held in (
            self._sent,
            self._lines,
            self._announcing,
            self._lying,
            self._streaming,
            self._answers,
            self._readers,
            self._letters,
            self._taking,
            self._unmatched,
        ):
            held.clear()
        self._record = None


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The flat ``x`` as bytes, which any thread may fill, whatever mode this one is in."""
    # Inference mode makes a view in another dtype an inference tensor, which it alone may write to.
    with torch.inference_mode(False):
        return x.view(torch.uint8)

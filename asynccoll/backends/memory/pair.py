"""Point-to-point messages of two ranks through memory that they share: any number, in order per tag.

The protocol is the one that MPI libraries use. Each rank has a ring of records for the other to read: the
slots of their region (``layout``), and for each slot a note of four words that says what the record is.

- ``RTS`` announces a message: number, tag, dtype and length. A short one is *eager*: its data is in the slot.
- ``CTS``: a receive was matched with a message that was not eager, and its data is wanted.
- ``DATA``: the next part of such a message.
- ``ACK``: a message was received. Only this ends a send: sends are synchronous, as ``MPI_Ssend``.

A receive is *posted* until it is matched; a message that precedes its receive is *unexpected*. Records are
read in order by any thread that moves the pair (``moving``), whether or not a thread awaits their messages.
So a message that is never received does not hold up other tags. The data of a long message stays with its
sender until CTS, and a receiver keeps at most ``_MOST_EAGER`` short ones: unexpected messages take bounded
memory.

**Why this is safe.** Every word has one writer. A record is committed by one store, of its step into
``POSTED``, after its note and its data; other processors see the stores of an x86-64 in that order, and
shared memory is used on no other architecture. Ctrl-C may come anywhere, also while the lock is held, which
is then released in the middle of a step. So every step can be done again, and the next thread that takes the
lock does so: a record stays in ``_record`` from before its first word is written until its effect is noted
here, and a record counts as read (``READ``) only when everything that it asks for is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import NamedTuple

import torch

from asynccoll.backends.api import DTYPES_BY_NAME, SHORTEST_NAP_SECONDS, Completion, encoded, host, unlike
from asynccoll.backends.memory.flight import InFlight
from asynccoll.backends.memory.layout import POSTED, READ, SLOTS
from asynccoll.backends.memory.moving import Bells, Mover
from asynccoll.backends.memory.region import Region
from asynccoll.errors import CollectiveError, PeerRefusedError

_RTS, _CTS, _DATA, _ACK = range(1, 5)
#: Instead of a dtype's code: there is no message, and the data is the reason, as text.
_REFUSED = 255
_NAMES = sorted(DTYPES_BY_NAME)
_CODES = {DTYPES_BY_NAME[name]: code for code, name in enumerate(_NAMES)}
#: How many messages of one tag may be announced but not acknowledged.
_MOST_ANNOUNCED = 16
#: How many eager messages may be unacknowledged: the receiver may keep a copy of each, up to a slot long.
_MOST_EAGER = 16
#: How many records, a new part included, may be unread: with more, data leaves the cache before it is read.
_AHEAD = 3
#: The line of text in each slot. No rank reads it; a simulation uses it to log a send.
_TEXT = b"send"


class Outgoing(InFlight):
    """A send of ``data``."""

    __slots__ = ("announced", "code", "data", "number", "posted_bytes", "tag")

    def __init__(self, pair: Pair, data: torch.Tensor, code: int, tag: int, number: int) -> None:
        super().__init__(pair)
        self.data: torch.Tensor = data
        self.code: int = code
        self.tag: int = tag
        self.number: int = number
        #: whether its RTS is posted
        self.announced: bool = False
        #: how many of its bytes are posted as DATA
        self.posted_bytes: int = 0


class Incoming(InFlight):
    """A receive, into ``data``."""

    __slots__ = ("code", "data", "number", "tag")

    def __init__(self, pair: Pair, data: torch.Tensor, code: int, tag: int, number: int) -> None:
        super().__init__(pair)
        self.data: torch.Tensor = data
        self.code: int = code
        self.tag: int = tag
        self.number: int = number


class _Unexpected:
    """A message that the other rank has announced, until it is matched."""

    __slots__ = ("code", "data", "number", "receive", "size")

    def __init__(self, number: int, code: int, size: int, data: torch.Tensor | None) -> None:
        """``data`` is that of an eager message, in its slot or as a copy; None for others."""
        self.number = number
        self.code = code
        self.size = size
        self.data = data
        self.receive: Incoming | None = None


class _Record(NamedTuple):
    """The record to be posted next. ``message`` is the send that it is about; None for a reply (CTS, ACK)."""

    step: int
    kind: int
    number: int
    message: Outgoing | None
    note: tuple[int, int, int, int]
    data: torch.Tensor | None


class Pair(Mover):
    """The messages between this rank and one other, as this rank sees them."""

    def __init__(
        self,
        region: Region,
        bells: Bells,
        where: str,
        ranks: Sequence[int],
        died: Callable[[], Sequence[int]],
    ) -> None:
        """``died`` returns which ranks of the lane have ended: each of them ends all messages of the lane."""
        super().__init__(region, bells, where, ranks)
        self._died = died
        self._theirs = region.others[0]
        self._other = 1 - region.index
        self._posted: int = 0  # the step of the last record that was posted
        self._knocked: int = 0  # the value of ``_posted`` when the other rank was last told of a full ring
        self._numbers = count(1)
        self._record: _Record | None = None
        # This rank's sends, by number, oldest first.
        self._sends: dict[int, Outgoing] = {}  # those not acknowledged
        self._sends_by_tag: dict[int, dict[int, Outgoing]] = {}  # the same, by tag
        self._announcing: dict[int, Outgoing] = {}  # those whose RTS is to be posted
        self._eager: dict[int, None] = {}  # those not acknowledged whose data was posted with the RTS
        self._streaming: dict[int, Outgoing] = {}  # those whose CTS was read, with data yet to be posted
        # This rank's receives, and the messages for them: by tag, then by number.
        self._receives: dict[int, dict[int, Incoming]] = {}  # those posted
        self._unexpected: dict[int, dict[int, _Unexpected]] = {}
        self._tags_to_match: dict[int, None] = {}  # the tags of new receives
        self._receiving: dict[int, Incoming] = {}  # those matched, after CTS, by the number of the message
        self._replies: dict[tuple[int, int], None] = {}  # CTS and ACK to be posted: (kind, number)

    # Issuing

    def send(self, x: torch.Tensor, tag: int) -> Completion:
        """Send the flat ``x``; the send is over when the other rank has received it."""
        return self._send(_bytes_of(x), _CODES[x.dtype], tag)

    def recv(self, x: torch.Tensor, tag: int) -> Completion:
        """Receive into the flat ``x``."""
        message = Incoming(self, _bytes_of(x), _CODES[x.dtype], tag, next(self._numbers))
        return self._begin(message, partial(self._enter_receive, message))

    def refuse(self, tag: int, why: str) -> Completion:
        """Make the other rank's receive fail with ``why``, instead of sending."""
        text = bytearray(encoded(why)[: self.region.layout.slot_bytes])
        return self._send(torch.frombuffer(text, dtype=torch.uint8), _REFUSED, tag)

    def _send(self, data: torch.Tensor, code: int, tag: int) -> Completion:
        message = Outgoing(self, data, code, tag, next(self._numbers))
        return self._begin(message, partial(self._enter_send, message))

    def _begin(self, message: InFlight, enter: Callable[[], object]) -> Completion:
        if not self._watched:  # from now on the other rank may ring this rank's watcher
            self._be_known()
        try:
            with self._lock:
                if self._broken is not None:
                    message.end(self._broken)
                    return message
                enter()
                moved = self._move()
                # The message to be received may be in the ring already. Read at most one ring's worth, since
                # the other rank may go on posting.
                for _ in range(SLOTS):
                    if not self._has_record():
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

    def _enter_send(self, message: Outgoing) -> None:
        """Queue a send behind those of its tag."""
        of_tag = self._sends_by_tag.setdefault(message.tag, {})
        into = [self._sends, of_tag]
        if len(of_tag) < _MOST_ANNOUNCED:
            into.append(self._announcing)
        # Within one call of C, so that an interrupt leaves the message in all of them or in none.
        any(map(dict.__setitem__, into, repeat(message.number), repeat(message)))

    def _enter_receive(self, message: Incoming) -> None:
        """Queue a receive behind those of its tag."""
        self._tags_to_match[message.tag] = None
        self._receives.setdefault(message.tag, {})[message.number] = message

    # What moves

    def _is_busy(self) -> bool:
        return bool(self._sends or self._receives or self._receiving or self._replies)

    def _goes_on_by_itself(self) -> bool:
        """Return False if only ACKs of eager sends are missing: a waiter of these sends reads them."""
        return bool(
            self._listened
            or self._receives
            or self._receiving
            or self._replies
            or len(self._sends) > len(self._eager)
        )

    def _step(self) -> bool:
        read = self._read()
        while self._tags_to_match:
            tag = next(iter(self._tags_to_match))
            self._match(tag)
            self._tags_to_match.pop(tag, None)
        return self._post() or read

    # Posting

    def _post(self) -> bool:
        """Post records as far as there is room; return whether any was posted."""
        words, posted = self._words, False
        while (record := self._record or self._next()) is not None:
            self._record = record
            slot = record.step % SLOTS
            if words[self._mine + POSTED + slot] != record.step:  # else posted already, before an interrupt
                self.region.write_note(slot, record.note)
                if record.data is not None:
                    self._slot(self.region.index, slot, record.data.numel()).copy_(record.data)
                words[self._mine + POSTED + slot] = record.step
            self._note_posted(record)
            self._posted = record.step
            self._record = None
            posted = True
        return posted

    def _next(self) -> _Record | None:
        """Return the record to be posted next, replies first; None if there is none, or no room."""
        if not (self._replies or self._announcing or self._streaming):
            return None
        step = self._posted + 1
        unread = step - self._words[self._theirs + READ]
        if unread > SLOTS:
            self._knock()
            return None
        if self._replies:
            kind, number = next(iter(self._replies))
            return _Record(step, kind, number, None, (kind, number, 0, 0), None)
        if self._announcing:
            return self._rts_record(step, next(iter(self._announcing.values())))
        if self._streaming and unread <= _AHEAD:
            return self._data_record(step, next(iter(self._streaming.values())))
        return None

    def _knock(self) -> None:
        """Ring the other rank, once, to read the full ring, if there is no room for replies.

        It does not look by itself if all of its sends are eager and no thread there waits for one.
        """
        if self._replies and self._knocked != self._posted:
            self._knocked = self._posted
            self._bells.ring(self._other)

    def _rts_record(self, step: int, message: Outgoing) -> _Record:
        self.region.write_text(step % SLOTS, _TEXT)
        size = message.data.numel()
        refused = message.code == _REFUSED
        eager = size <= self.region.layout.slot_bytes and (refused or len(self._eager) < _MOST_EAGER)
        kind = _RTS | message.code << 8 | message.tag << 32
        note = kind, message.number, size, int(eager)
        return _Record(step, _RTS, message.number, message, note, message.data if eager else None)

    def _data_record(self, step: int, message: Outgoing) -> _Record:
        size = min(self.region.layout.slot_bytes, message.data.numel() - message.posted_bytes)
        data = message.data.narrow(0, message.posted_bytes, size)
        note = _DATA, message.number, size, message.posted_bytes
        return _Record(step, _DATA, message.number, message, note, data)

    def _note_posted(self, record: _Record) -> None:
        """Note here that ``record`` was posted. May be done twice, after an interrupt."""
        message = record.message
        if message is None:
            self._replies.pop((record.kind, record.number), None)
        elif record.kind == _RTS:
            message.announced = True
            if record.data is not None and record.number in self._sends:  # else it was received meanwhile
                self._eager[record.number] = None
            self._announcing.pop(record.number, None)
        else:
            message.posted_bytes = record.note[3] + record.note[2]
            if message.posted_bytes == message.data.numel():
                self._streaming.pop(record.number, None)

    def _slot(self, rank: int, slot: int, size: int) -> torch.Tensor:
        return self.region.views(slot, torch.uint8, size)[rank]

    # Reading

    def _has_record(self) -> bool:
        """Whether there is a record to read."""
        step = self._words[self._mine + READ] + 1
        return bool(self._words[self._theirs + POSTED + step % SLOTS] == step)

    def _read(self) -> bool:
        """Read one record, and do what it asks for; return whether there was one."""
        words = self._words
        step = words[self._mine + READ] + 1
        slot = step % SLOTS
        if words[self._theirs + POSTED + slot] != step:
            return False
        what, number, size, more = self.region.note(self._other, slot)
        kind = what & 255
        if kind == _RTS:
            data = self._slot(self._other, slot, size) if more else None
            self._got_rts(number, what >> 8 & 255, what >> 32, size, data)
        elif kind == _DATA:
            self._got_data(number, more, self._slot(self._other, slot, size))
        elif kind == _ACK:
            self._got_ack(number)
        elif (message := self._sends.get(number)) is not None:
            self._streaming[number] = message
        words[self._mine + READ] = step
        return True

    def _got_rts(self, number: int, code: int, tag: int, size: int, data: torch.Tensor | None) -> None:
        """Take an announced message; ``data`` is that of an eager one, in its slot."""
        message = self._unexpected.get(tag, {}).get(number)
        if message is None:
            if number in self._receiving or (_ACK, number) in self._replies:
                return  # it was matched already, before an interrupt
            message = _Unexpected(number, code, size, data)
            self._unexpected.setdefault(tag, {})[number] = message
        self._match(tag)
        if message.data is not None and number in self._unexpected.get(tag, {}):
            message.data = message.data.clone()  # not matched yet, and its slot will be used again

    def _match(self, tag: int) -> None:
        """Match the messages of a tag with its receives, in order."""
        messages, receives = self._unexpected.get(tag, {}), self._receives.get(tag, {})
        while messages:
            message = next(iter(messages.values()))
            if message.receive is None:
                if not receives:
                    break
                message.receive = next(iter(receives.values()))  # the same one if this is done again
            self._deliver(message, message.receive)
            receives.pop(message.receive.number, None)
            messages.pop(message.number, None)
        if not messages:
            self._unexpected.pop(tag, None)
        if not receives:
            self._receives.pop(tag, None)

    def _deliver(self, message: _Unexpected, receive: Incoming) -> None:
        into = receive.data
        if message.code != receive.code or message.size != into.numel():
            self._acknowledge(message.number, receive, self._misfit(message, receive))
        elif message.data is None:
            self._receiving[message.number] = receive
            self._replies[_CTS, message.number] = None
        else:
            if not receive.finished:  # else this is done again, and the memory is the user's
                into.copy_(message.data)
            self._acknowledge(message.number, receive, None)

    def _misfit(self, message: _Unexpected, receive: Incoming) -> CollectiveError:
        """Return the error of a receive that does not fit ``message``."""
        if message.code == _REFUSED:
            assert message.data is not None
            return PeerRefusedError(bytes(message.data.numpy()).decode(errors="replace"))
        sent, wanted = DTYPES_BY_NAME[_NAMES[message.code]], DTYPES_BY_NAME[_NAMES[receive.code]]
        return unlike(
            message.size // sent.itemsize,
            sent,
            receive.data.numel() // wanted.itemsize,
            wanted,
        )

    def _got_data(self, number: int, start: int, data: torch.Tensor) -> None:
        """Copy the next part of a message to the offset ``start`` in the memory of its receive."""
        receive = self._receiving.get(number)
        if receive is None:
            return  # this was the last part, and was taken already, before an interrupt
        end = start + data.numel()
        if not receive.finished:  # else this is done again, and the memory is the user's
            receive.data.narrow(0, start, data.numel()).copy_(data)
        if end == receive.data.numel():
            self._acknowledge(number, receive, None)
            self._receiving.pop(number, None)

    def _acknowledge(self, number: int, receive: Incoming, error: CollectiveError | None) -> None:
        self._replies[_ACK, number] = None
        self._over(receive, error)

    def _got_ack(self, number: int) -> None:
        message = self._sends.get(number)
        if message is None:
            return
        self._over(message, None)
        of_tag = self._sends_by_tag.get(message.tag, {})
        of_tag.pop(number, None)
        if not of_tag:
            self._sends_by_tag.pop(message.tag, None)
        for one in islice(of_tag.values(), _MOST_ANNOUNCED):
            if not one.announced:
                self._announcing[one.number] = one
        self._eager.pop(number, None)
        self._sends.pop(number, None)  # last, so that an ACK that was interrupted is taken again

    # Ends

    def flush(self, seconds: float) -> None:
        """Post the replies that are due before this rank leaves: the other rank waits for them."""
        deadline = host.monotonic() + seconds
        while self._replies and not self._gone() and host.monotonic() < deadline:
            if not self._move_on():
                host.sleep(SHORTEST_NAP_SECONDS)

    def _gone(self) -> list[int]:
        return sorted({*super()._gone(), *self._died()})

    def _drop(self, error: CollectiveError) -> None:
        receives = [one for of_tag in self._receives.values() for one in of_tag.values()]
        for message in (*self._sends.values(), *receives, *self._receiving.values()):
            self._over(message, error)
        for held in (
            self._sends,
            self._sends_by_tag,
            self._announcing,
            self._eager,
            self._streaming,
            self._replies,
            self._receives,
            self._unexpected,
            self._receiving,
            self._tags_to_match,
        ):
            held.clear()
        self._record = None


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the flat ``x`` as bytes, for any thread to fill, whatever mode this one is in."""
    # In inference mode a view in another dtype is an inference tensor, which only that mode may write to.
    with torch.inference_mode(False):
        if x.stride(0) != 1:  # it has one element or none, and torch looks at the stride all the same
            x = x.as_strided(x.shape, (1,))
        return x.view(torch.uint8)

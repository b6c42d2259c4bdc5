"""Read a flight recorder's memory as values, and turn these into JSON for other hosts and files, and back.

The memory may be written while it is read, or belong to a process that died in the middle of a write:
inconsistent records are left out, never guessed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from asynccoll.flight import layout
from asynccoll.flight.layout import ENDINGS, PARTS, RECORD, RECORDS, RECORDS_AT
from asynccoll.host.call_number import call_name, message_name
from asynccoll.host.words import lane_name


class Call(NamedTuple):
    """One operation. Times are seconds of the host's monotonic clock; 0.0 is not yet.

    ``sequence`` is its place in the order of its lane, from 1; 0 for a message. ``part`` is its number among
    the parts of a call at that place, from 1; for a message, its tag. ``peer`` is the other rank's index in
    the group for a message, else -1.
    """

    ticket: int
    group: str
    lane_key: str
    lane: str
    operation: str
    of: str
    place: str
    sequence: int
    part: int
    peer: int
    size_bytes: int
    called: float
    begun: float
    ended: float
    waited: float
    failure: str
    #: when the program last asked whether it was over; 0.0 also if it is over by now
    polled: float = 0.0

    @property
    def state(self) -> str:
        """``queued``, ``in flight``, ``finished`` (it was seen to end), ``failed`` or ``refused``."""
        if self.failure:
            return "refused" if self.was_refused else "failed"
        if self.ended:
            return "finished"
        return "in flight" if self.begun else "queued"

    @property
    def told(self) -> str:
        """The call in words: ``all_reduce float32[4] sum at train.py:12``."""
        return f"{self.operation} {self.of}".rstrip() + f" at {self.place}"

    @property
    def was_refused(self) -> bool:
        """Whether its own rank refused it before any of it was sent; ``failure`` says why."""
        return self.waited == layout.REFUSED and bool(self.failure)

    @property
    def timed_out(self) -> float:
        """When the wait for it timed out, if it has not been waited for since; else 0.0."""
        ended = self.waited < 0 and self.waited != layout.GIVEN_UP and not self.was_refused
        return -self.waited if ended else 0.0

    def is_waited_for(self, since: float) -> bool:
        """Whether it is waited for, or was until a timeout or a poll at or after ``since``."""
        return self.waited > 0 or 0 < since <= max(self.timed_out, self.polled)

    def refusal(self, of: str) -> str:
        """Describe the refusal, where ``of`` was expected: ``called it at train.py:12, and it was ...``."""
        other = f"{self.operation} instead" if self.sequence else self.title
        what = "it" if self.operation == of else other
        return f"called {what} at {self.place}, and it was refused there: {self.failure}"

    @property
    def is_open(self) -> bool:
        """Whether it has not failed and was not seen to end."""
        return not (self.failure or self.ended)

    @property
    def name(self) -> str:
        """``all_reduce #41 on lane 'gradients'``; with the ranks of the group if that is not the world."""
        return f"{self.title} on {lane_name(self.lane, self.group)}" if self.lane else self.title

    @property
    def title(self) -> str:
        """``all_reduce #41``, or ``send to rank 1 (tag 0)``."""
        if self.peer_rank < 0:
            return call_name(self.operation, self.sequence)
        return message_name(self.operation, self.peer_rank, self.part)

    @property
    def peer_rank(self) -> int:
        """For a message, the other rank's global rank; else -1, and also if the group's name was cut."""
        if self.peer < 0 or self.sequence or self.group == "world":
            return -1 if self.sequence else self.peer
        ranks = [] if layout.is_cut(self.group) else self.group.split("-")
        return int(ranks[self.peer]) if self.peer < len(ranks) and ranks[self.peer].isdigit() else -1


class Progress(NamedTuple):
    """How far a rank has got on one lane: ``sequence`` is the place of its latest call there."""

    group: str
    lane_key: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Flight:
    """What one rank has recorded: ``calls``, the oldest first, and ``lanes``, open or closed.

    ``lanes`` lacks those for which there was no room (``layout.LANES``), and some that were closed long ago.

    ``began`` and ``wall`` are the monotonic and the wall clock at the same moment. ``ending`` is one of
    ``layout.ENDINGS``, ``ended`` its time (monotonic; 0.0 if unknown), ``code`` the exit code if known,
    negative for a signal. ``said``: host, address, the error that it died of (``why``).
    """

    rank: int
    world_size: int
    pid: int
    began: float
    wall: float
    ending: str
    ended: float
    calls: tuple[Call, ...]
    lanes: tuple[Progress, ...]
    said: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    #: by lane, filled on first use, as a comparison asks for the same lanes for each call: the calls,
    #: those that were refused, and how far the rank has got
    _on_lanes: dict[tuple[str, str], tuple[Call, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _refused: dict[tuple[str, str], list[Call]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _reached: dict[tuple[str, str], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def was_killed(self) -> bool:
        """For a rank that is gone, whether it ended without recording an end, or by a signal."""
        return self.ending == "running" or (self.code is not None and self.code < 0)

    def has_used(self, group: str) -> bool:
        """Whether it has a lane of this group, or has recorded a call there."""
        self._sort()
        return any(group == of for of, _ in self._reached)

    def reached(self, group: str, lane_key: str) -> int:
        """Return the place of its latest call on that lane, as far as is recorded; 0 if it has made none."""
        self._sort()
        return self._reached.get((group, lane_key), 0)

    def refused(self, group: str, lane_key: str, sequence: int, part: int = 1) -> Call | None:
        """Return the call at that place, if the rank refused ``part`` or an earlier part of it; else None."""
        self._sort()
        for call in self._refused.get((group, lane_key), ()):
            if 0 < call.sequence == sequence and call.part <= part:
                return call
        return None

    def on_lane(self, group: str, lane_key: str) -> tuple[Call, ...]:
        """Return the rank's calls on that lane."""
        self._sort()
        return self._on_lanes.get((group, lane_key), ())

    def _sort(self) -> None:
        """Sort the calls by lane, once."""
        if self._reached:
            return
        found: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
        for one in self.calls:
            found[one.group, one.lane_key].append(one)
        reached = {(one.group, one.lane_key): one.sequence for one in self.lanes}
        for lane, calls in found.items():
            reached[lane] = max(reached.get(lane, 0), *(one.sequence for one in calls))
            self._refused[lane] = [one for one in calls if one.was_refused]
            self._on_lanes[lane] = tuple(calls)
        self._reached.update(reached)


def read(memory: memoryview | bytes) -> Flight | None:
    """Return what is recorded in ``memory``; None unless it is a flight recorder's, of this version."""
    head = _head(memory)
    if head is None:
        return None
    rank, world_size, pid, began, wall, ended, how, code = head
    return Flight(
        rank, world_size, pid, began, wall, ENDINGS[how], ended, (*_calls(memory),), (*_lanes(memory),),
        said(memory), None if code == layout.NO_CODE else code,
    )  # fmt: skip


def said(memory: memoryview | bytes) -> dict[str, object]:
    """Return what the rank says about itself, reading nothing else; {} where ``read`` returns None."""
    if _head(memory) is None:
        return {}
    (length,) = layout.LENGTH.unpack_from(memory, layout.SAID_AT)
    start = layout.SAID_AT + layout.LENGTH.size
    try:
        found = json.loads(bytes(memory[start : min(start + length, layout.HEADER_BYTES)]))
    except ValueError:  # nothing there yet, or being written just now
        return {}
    return found if isinstance(found, dict) else {}


def _head(memory: memoryview | bytes) -> tuple[Any, ...] | None:
    if len(memory) < layout.SIZE_BYTES:
        return None
    magic, version, *rest = layout.HEADER.unpack_from(memory)
    ended, how, code = layout.ENDING.unpack_from(memory, layout.ENDING_AT)
    known = magic == layout.MAGIC and version == layout.VERSION and how < len(ENDINGS)
    return (*rest, ended, how, code) if known else None


def _lanes(memory: memoryview | bytes) -> Iterator[Progress]:
    table = bytes(memory[layout.LANES_AT : RECORDS_AT])
    for place, length, text in layout.LANE.iter_unpack(table):
        if length and len(parts := layout.parted(text[:length])) == 2:
            yield Progress(parts[0], parts[1], place)


def _calls(memory: memoryview | bytes) -> Iterator[Call]:
    # Unpack a copy: the memory may change between two reads.
    records = bytes(memory[RECORDS_AT : layout.HEADERS_AT])
    tickets = memoryview(records).cast("Q")[:: layout.WORDS].tolist()
    texts: dict[int, list[str]] = {}
    for ticket in sorted({*tickets} - {0}):
        begun, text, *numbers, ended, waited, outcome, again = RECORD.unpack_from(
            records, ticket % RECORDS * RECORD.size
        )
        if not ticket == begun == again:
            continue
        if text not in texts:
            texts[text] = parts_at(memory, text)
        if len(texts[text]) == len(PARTS):
            failure = text_at(memory, outcome) if outcome else ""
            times = max(0.0, ended), waited
            yield Call._make((ticket, *texts[text], *numbers, *times, failure, max(0.0, -ended)))


def text_at(memory: memoryview | bytes, number: int) -> str:
    """Return the text of that number; "" if there is none."""
    return _text(memory, number).decode(errors="replace")


def parts_at(memory: memoryview | bytes, number: int) -> list[str]:
    """Return the parts of that text."""
    return layout.parted(_text(memory, number))


def _text(memory: memoryview | bytes, number: int) -> bytes:
    at = layout.TEXTS_AT + number % (2 * layout.HALF_BYTES)
    if not number or at + layout.LENGTH.size + layout.TEXT_BYTES > len(memory):
        return b""
    (length,) = layout.LENGTH.unpack_from(memory, at)
    start = at + layout.LENGTH.size
    return bytes(memory[start : start + min(length, layout.TEXT_BYTES)])


def to_plain(flight: Flight, calls: int | None = None) -> dict[str, Any]:
    """Return ``flight`` as JSON values, each call as a list in the order of the fields of ``Call``.

    ``calls``: keep only that many of the latest calls, and earlier ones that are not over; None keeps all.
    """
    plain = {field.name: getattr(flight, field.name) for field in fields(flight) if field.init}
    early = 0 if calls is None else max(0, len(flight.calls) - calls)
    kept = [*(call for call in flight.calls[:early] if call.is_open), *flight.calls[early:]]
    plain["calls"] = list(map(list, kept))
    plain["lanes"] = [one._asdict() for one in flight.lanes]
    return plain


def plain_call(call: Call, now: float) -> dict[str, object]:
    """Return a call for people and programs: what, where, and how many seconds ago; None is unknown."""
    return {
        "operation": call.operation,
        "sequence": call.sequence,
        "of": call.of,
        "lane": call.lane,
        "group": call.group,
        "size_bytes": call.size_bytes,
        "place": call.place,
        "state": call.state,
        "ago_s": round(now - call.called, 3) if now else None,
        "took_s": round(call.ended - call.called, 6) if call.ended else None,
        "failure": call.failure,
    }


def from_plain(plain: Mapping[str, Any]) -> Flight:
    """Return the ``Flight`` that ``to_plain`` turned into ``plain``. Raises ``ValueError`` if it did not."""
    try:
        calls = tuple(Call(*call) for call in plain["calls"])
        lanes = tuple(Progress(**one) for one in plain["lanes"])
        return Flight(**{**plain, "calls": calls, "lanes": lanes})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a recorded flight: {error}") from error

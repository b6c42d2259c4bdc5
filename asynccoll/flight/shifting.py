"""Detect that two ranks are a call apart: from some call on, each call of one meets a later one of the other.

If a rank skips one of several identical calls, its next call is paired with the one that it skipped, and so
on from there: nothing fails, and results mix different calls. The lines of the calls reveal this: those of
one rank are those of the other, one or two calls later. Ranks may also call from different lines on purpose
(``if rank == 0: ... else: ...``), which is not a shift. So a difference counts as a shift only if

- both ranks have made a call together from each of the two lines before,
- the two lines were never paired before,
- all calls from the first suspicious one on (a *run*) fit the same shift, and
- enough of them came from different lines (``_ENOUGH``).

Here a call has a ``sequence``, its number in the order of its lane, and a ``place``, the line that made it,
as in ``reading.Call``. Pure, but a ``Comparison`` remembers what it has seen, because much of a recorder's
ring is overwritten between two looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from asynccoll.flight.layout import HEADERS_AT, OUTCOME, PARTS, RECORDS, RECORDS_AT, WORDS
from asynccoll.flight.reading import parts_at
from asynccoll.host.call_number import call_name
from asynccoll.host.words import ranks_of

#: By how many calls two ranks may be apart.
_MOST_APART = 2
_SHIFTS = tuple(by for apart in range(1, _MOST_APART + 1) for by in (apart, -apart))
#: How many calls of a run must have come from different lines: four steps of a loop that calls from two.
_ENOUGH = 8
_NUMBERS = range(RECORDS)
#: The index of the part in a record, in units of four bytes.
_PART = 6


class Made(NamedTuple):
    """A call as it was recorded, without its numbers. ``of``: its payload; ``place``: file and line."""

    group: str
    lane_key: str
    lane: str
    operation: str
    of: str
    place: str


#: The calls of a lane that did not fail, by ``sequence``.
Calls = Mapping[int, Made]


@dataclass(frozen=True, slots=True)
class Shift:
    """A shift: since the call ``sequence`` of one lane, ``ranks`` are ``by`` calls apart.

    ``made``: what each of them called there. ``exact``: whether the call before was compared as well, and was
    not part of the shift; otherwise they may have been apart for longer.
    """

    ranks: tuple[int, int]
    by: int
    sequence: int
    made: tuple[Made, Made]
    exact: bool

    def __str__(self) -> str:
        (one, other), (first, second) = self.ranks, self.made
        of = "" if first.group == "world" else f" of ranks {ranks_of(first.group)}"
        apart, skipped = (
            ("a call", "skipped a call or made one more")
            if self.by == 1
            else (f"{self.by} calls", "skipped calls or made more")
        )
        since = call_name(first.operation, self.sequence)
        return (
            f"ranks {one} and {other} are {apart} apart on lane {first.lane!r}{of} since {since}"
            f"{'' if self.exact else ' or before'}: rank {one} made it at {first.place}, rank {other} at "
            f"{second.place}; one of them has {skipped}, and results since then mix different calls"
        )


@dataclass(slots=True)
class _Run:
    """Consecutive calls that may be a shift. The first fields are those of ``Shift``.

    ``counts``: each shift that all of them fit, and how many are evidence for it. ``pairs``: their lines.
    """

    sequence: int
    made: tuple[Made, Made]
    exact: bool
    counts: dict[int, int] = field(default_factory=lambda: dict.fromkeys(_SHIFTS, 0))
    pairs: set[frozenset[str]] = field(default_factory=set)


class Comparison:
    """What comparing two ranks on one lane has shown so far."""

    def __init__(self, ranks: tuple[int, int]) -> None:
        self._ranks = ranks
        self._latest = 0  # the sequence that was compared last
        #: lines from which both ranks have made a call together
        self._shared: set[str] = set()
        #: pairs of lines that were no shift: the program calls from both on purpose
        self._intended: set[frozenset[str]] = set()
        self._run: _Run | None = None

    def look(self, one: Calls, other: Calls) -> Shift | None:
        """Compare the calls not seen before; return the shift, once enough of them have shown one."""
        if not one or not other:
            return None
        last = max(one) - _MOST_APART  # later ones have neighbors that are not recorded yet
        new = sorted(number for number in one.keys() & other.keys() if self._latest < number <= last)
        for sequence in new:
            mine, theirs = one[sequence].place, other[sequence].place
            if mine == theirs and self._run is None:
                self._shared.add(mine)
            elif (found := self._suspect(sequence, one, other)) is not None:
                return found
            self._latest = sequence
        return None

    def _suspect(self, sequence: int, one: Calls, other: Calls) -> Shift | None:
        """Compare a call from different lines, or any call that follows one in a run."""
        mine, theirs = one[sequence].place, other[sequence].place
        pair = frozenset((mine, theirs))
        if self._run is None and pair not in self._intended:
            self._run = _Run(sequence, (one[sequence], other[sequence]), self._latest == sequence - 1)
        run = self._run
        if run is None:
            return None
        differ = mine != theirs
        if differ:
            run.pairs.add(pair)
        counts = differ and self._shared >= pair and pair not in self._intended
        self._narrow(run, {by: one.get(sequence + by) for by in _SHIFTS}, theirs, counts)
        if not run.counts:
            self._intended |= run.pairs
            self._run = None
            if not differ:
                self._shared.add(mine)
            return None
        by = next((by for by, count in run.counts.items() if count >= _ENOUGH), None)
        return None if by is None else Shift(self._ranks, abs(by), run.sequence, run.made, run.exact)

    @staticmethod
    def _narrow(run: _Run, near: Mapping[int, Made | None], theirs: str, counts: bool) -> None:
        """Drop the shifts that one more call does not fit; if it ``counts``, it supports the others."""
        for by, neighbour in near.items():
            if by in run.counts and neighbour is not None:
                if neighbour.place == theirs:
                    run.counts[by] += counts
                else:
                    del run.counts[by]


def made(memory: memoryview | bytes) -> dict[tuple[str, str], dict[int, Made]]:
    """Return the calls in a recorder's ``memory`` as they are compared here, by lane and ``sequence``.

    Several times as fast as ``read``, since a running program does this every few seconds. The memory may be
    another rank's, which goes on writing: a record with two different tickets is left out.
    """
    records = memoryview(bytes(memory[RECORDS_AT:HEADERS_AT]))
    words = records.cast("Q")
    columns = [words[word::WORDS].tolist() for word in (0, WORDS - 1, 1, 2, OUTCOME)]
    parts = records.cast("I")[_PART :: 2 * WORDS].tolist()
    known: dict[int, Made | None] = {}
    found: dict[tuple[str, str], dict[int, Made]] = {}
    for number, part, ticket, again, text, sequence, failed in zip(_NUMBERS, parts, *columns, strict=True):
        if part == 1 and sequence and not failed and ticket == again and ticket % RECORDS == number:
            if text not in known:
                fields = parts_at(memory, text)
                known[text] = Made(*fields) if len(fields) == len(PARTS) else None
            if (one := known[text]) is not None:
                found.setdefault((one.group, one.lane_key), {})[sequence] = one
    return found

"""Whether two ranks are a call apart: from some call on, each of one is paired with another one of the other.

If a rank skips one of several calls that are alike, its next one takes the place, and so for ever: nothing
fails, and results mix different calls. It shows in the lines: those of one rank are the other's, one or two
places on. Ranks may call from different lines as they please (``if rank == 0: ... else: ...``), and that must
not be taken for it. So it counts as a shift only where both ranks called from both lines together before, and
had the two at one place never but in this shift; the first place that does not fit ends it; and enough of
them must be seen.

Pure: a ``Comparison`` remembers what was seen before, for of a ring much is overwritten between two looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from asynccoll.flight.layout import HEADERS_AT, OUTCOME, PARTS, RECORDS, RECORDS_AT, WORDS
from asynccoll.flight.reading import parts_at
from asynccoll.host.call_number import call_name

__all__ = ["Comparison", "Made", "Shift", "made"]

#: By how many calls two ranks may be apart.
_MOST_APART = 2
_SHIFTS = tuple(by for apart in range(1, _MOST_APART + 1) for by in (apart, -apart))
#: So many places must have come from different lines: of two lines in a loop, the steps are half as many.
_ENOUGH = 8
_NUMBERS = range(RECORDS)
#: Of a record, where its part is, in halves of words.
_PART = 6


class Made(NamedTuple):
    """What is recorded of a call, but for its numbers."""

    group: str
    lane_key: str
    lane: str
    operation: str
    of: str
    place: str


#: The calls of a lane that did not fail, by their places.
Calls = Mapping[int, Made]


@dataclass(frozen=True, slots=True)
class Shift:
    """Of one lane: since the call at ``sequence`` ``ranks`` are ``by`` calls apart.

    ``made``: what each called there. ``exact``: whether the call before was seen, and was none of it; else
    they may be apart for longer.
    """

    ranks: tuple[int, int]
    by: int
    sequence: int
    made: tuple[Made, Made]
    exact: bool

    def __str__(self) -> str:
        (one, other), (first, second) = self.ranks, self.made
        of = "" if first.group == "world" else f" of ranks {first.group.replace('-', ', ')}"
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
    """Places one after the other that look like a shift; ``seen``: how often it was by so many calls."""

    sequence: int
    made: tuple[Made, Made]
    exact: bool
    seen: dict[int, int] = field(default_factory=lambda: dict.fromkeys(_SHIFTS, 0))
    pairs: set[frozenset[str]] = field(default_factory=set)


class Comparison:
    """Of two ranks on one lane."""

    def __init__(self, ranks: tuple[int, int]) -> None:
        self._ranks = ranks
        self._latest = 0  # the place that was compared last
        #: Lines that both ranks have called from at one place.
        self._together: set[str] = set()
        #: Pairs of lines at one place, which are no shift: the program means it.
        self._meant: set[frozenset[str]] = set()
        self._run: _Run | None = None

    def look(self, one: Calls, other: Calls) -> Shift | None:
        """Compare what was not compared yet; a shift, if there is one."""
        if not one or not other:
            return None
        last = max(one) - _MOST_APART  # of those beyond not all neighbours are known
        for place in sorted(place for place in one.keys() & other.keys() if self._latest < place <= last):
            mine, theirs = one[place].place, other[place].place
            if mine == theirs and self._run is None:
                self._together.add(mine)
            elif (found := self._apart(place, one, other)) is not None:
                return found
            self._latest = place
        return None

    def _apart(self, place: int, one: Calls, other: Calls) -> Shift | None:
        """A place from different lines, or in the run that such a one has begun."""
        mine, theirs = one[place].place, other[place].place
        pair = frozenset((mine, theirs))
        if self._run is None and pair not in self._meant:
            self._run = _Run(place, (one[place], other[place]), self._latest == place - 1)
        run = self._run
        if run is None:
            return None
        differ = mine != theirs
        if differ:
            run.pairs.add(pair)
        tells = differ and self._together >= pair and pair not in self._meant
        self._go_on(run, {by: one.get(place + by) for by in _SHIFTS}, theirs, tells)
        if not run.seen:
            self._meant |= run.pairs
            self._run = None
            if not differ:
                self._together.add(mine)
            return None
        by = next((by for by, times in run.seen.items() if times >= _ENOUGH), None)
        return None if by is None else Shift(self._ranks, abs(by), run.sequence, run.made, run.exact)

    @staticmethod
    def _go_on(run: _Run, near: Mapping[int, Made | None], theirs: str, tells: bool) -> None:
        """Leave of the run what this place agrees with."""
        for by, neighbour in near.items():
            if by in run.seen and neighbour is not None:
                if neighbour.place == theirs:
                    run.seen[by] += tells
                else:
                    del run.seen[by]


def made(memory: memoryview | bytes) -> dict[tuple[str, str], dict[int, Made]]:
    """What is in a recorder's ``memory``, as far as it is compared here: by lane and place.

    Several times as fast as ``read``: it is done again and again, in a program that has other things to do.
    """
    records = memoryview(bytes(memory[RECORDS_AT:HEADERS_AT]))
    words = records.cast("Q")
    columns = [words[word::WORDS].tolist() for word in (0, WORDS - 1, 1, 2, OUTCOME)]
    parts = records.cast("I")[_PART :: 2 * WORDS].tolist()
    known: dict[int, Made | None] = {}
    found: dict[tuple[str, str], dict[int, Made]] = {}
    for number, part, ticket, again, text, place, failed in zip(_NUMBERS, parts, *columns, strict=True):
        if part == 1 and place and not failed and ticket == again and ticket % RECORDS == number:
            if text not in known:
                said = parts_at(memory, text)
                known[text] = Made(*said) if len(said) == len(PARTS) else None
            if (one := known[text]) is not None:
                found.setdefault((one.group, one.lane_key), {})[place] = one
    return found

"""Which rank calls each operation last, how late each rank is, and whether one of them holds up the others.

Pure functions of parts whose times are on one clock.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from asynccoll.trace.parts import Part, calls, members
from asynccoll.trace.phases import Phases
from asynccoll.trace.spans import Interval, covered, length

#: A rank is late if the others wait for it repeatedly, for more than this share of the time, and more than
#: this many times as long as for the median of the other ranks: on a busy host two or three times is chance.
_LATE_SHARE = 0.05
_LATE_TIMES = 4.0
#: A few long waits are chance as well: this share of the waits for a rank, the longest, does not count.
_CHANCE = 0.1
#: But chance does not make one rank late in this share of the steps: then this many times as long is enough.
_STEADILY = 0.8
_STEADY_TIMES = 2.0
#: With fewer steps than this, chance makes one rank late in four out of five every now and then.
_STEADY_STEPS = 8
#: From this many steps on, the first one is left out, as it says little about the others. Fewer steps do not
#: show what recurs: then the operations are counted, regardless of steps.
STEPS = 3

#: A rank, when it called, and on which line.
Called = tuple[int, float, str]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One operation: the rank that called it last, on which line, and when.

    ``others`` is the median of the times at which the other ranks called it.
    """

    operation: str
    lane: str
    rank: int
    place: str
    called: float
    others: float

    @property
    def late(self) -> float:
        return self.called - self.others


@dataclass(frozen=True, slots=True)
class Lateness:
    """How often a rank was the last to call an operation, and how long the others waited for it."""

    rank: int
    last: int
    of: int
    total: float
    longest: float
    longest_operation: str
    longest_place: str
    longest_start: float
    #: what takes longer than on the others, in the steps in which it is late: a mark, or the time between
    #: two: ``between optimizer and forward``
    doing: str
    #: ``total`` without the longest tenth of the waits
    repeated: float = 0.0
    #: the lateness that it reaches in four out of five steps (or operations, if there are few steps), times
    #: the number of steps; 0 if there are fewer than eight
    steady: float = 0.0


def arrival(operation: str, lane: str, made: Sequence[Called]) -> Arrival:
    """Return the arrival of an operation that several ranks have called."""
    rank, called, place = max(made, key=lambda call: call[1])
    others = statistics.median(when for who, when, _ in made if who != rank)
    return Arrival(operation, lane, rank, place, called, others)


def arrivals(parts: Sequence[Part]) -> Iterator[Arrival]:
    """Yield the arrival of each operation that all recorded ranks of its group have called."""
    everyone = {part.rank for part in parts}
    for made in calls(parts).values():
        span = made[0][1]
        if len(made) > 1 and members(span, parts) & everyone <= {part.rank for part, _ in made}:
            yield arrival(span.name, span.row, [(part.rank, one.start, one.place) for part, one in made])


def waited_for(times: Iterable[Arrival]) -> list[Interval]:
    """Return when the others waited for a rank, from the operations for which it was late."""
    return covered((one.others, one.called) for one in times)


def lateness(parts: Sequence[Part], counted: Sequence[Part]) -> list[Lateness]:
    """Return the ranks by how long the others waited for them in what is ``counted`` of ``parts``."""
    found = list(arrivals(counted))
    by_rank: dict[int, list[Arrival]] = {part.rank: [] for part in parts}
    for one in found:
        by_rank[one.rank].append(one)
    phases = Phases(parts)
    ranks = [_of_rank(part, by_rank[part.rank], len(found), phases) for part in parts if found]
    return sorted(ranks, key=lambda one: -one.total)


def _of_rank(part: Part, times: list[Arrival], of: int, phases: Phases) -> Lateness:
    if not times:
        return Lateness(part.rank, 0, of, 0.0, 0.0, "", "", 0.0, "")
    times.sort(key=lambda one: -one.late)
    first, total = times[0], length(waited_for(times))
    steps = {bisect_right(part.steps, one.called) for one in times}
    return Lateness(
        part.rank, len(times), of, total, first.late, first.operation, first.place, first.called,
        phases.longer(part.rank, steps, total), length(waited_for(times[math.ceil(_CHANCE * len(times)) :])),
        _steady(part, times, of),
    )  # fmt: skip


def _steady(part: Part, times: Sequence[Arrival], operations: int) -> float:
    """Return what a rank is late by in nearly all steps, times their number; see ``Lateness.steady``."""
    several = len(part.steps) >= STEPS
    units = len(part.steps) - 1 if several else operations
    by_unit: dict[int, list[Arrival]] = {}
    for number, one in enumerate(times):
        by_unit.setdefault(bisect_right(part.steps, one.called) if several else number, []).append(one)
    late = sorted((length(waited_for(of_one)) for of_one in by_unit.values()), reverse=True)
    reached = math.ceil(_STEADILY * units)
    return late[reached - 1] * units if units >= _STEADY_STEPS and reached <= len(late) else 0.0


def late(ranks: Sequence[Lateness], seconds: float) -> Lateness | None:
    """Return the rank that holds up the others, if any, in a recording of which ``seconds`` count."""
    if not ranks:
        return None
    first, others = ranks[0], ranks[1:]
    enough = _LATE_SHARE * seconds
    of_others = statistics.median(one.total for one in others)
    again = first.repeated > enough and first.repeated > _LATE_TIMES * of_others
    steadily = (
        first.steady > enough
        and first.steady > _LATE_TIMES * statistics.median(one.steady for one in others)
        and first.total > _STEADY_TIMES * of_others
    )
    return first if again or steadily else None

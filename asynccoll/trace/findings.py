"""What a trace says: the hidden share of each step, the longest waits, stragglers, what hangs.

Pure: parts whose times lie on one clock go in, values come out, which the page, the terminal and ``--json``
show.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from asynccoll.flight.hanging import Hang, Unfinished, hang
from asynccoll.trace.parts import Part
from asynccoll.trace.spans import Span, covered, intersection, length, within

__all__ = ["Findings", "Lateness", "Step", "Unfinished", "Wait", "find", "hidden_fraction"]

Interval = tuple[float, float]
#: A rank is late if the others wait for it again and again, for such a share of the time, and so many times
#: as long as for the middle one of the others: on a busy host chance makes it two or three times.
_LATE_SHARE = 0.05
_LATE_TIMES = 4.0
#: A few long waits are chance as well, so this share of the times that a rank is late does not count.
_CHANCE = 0.1
#: But chance does not hit one rank in so many of the steps: then so many times as long is enough.
_STEADILY = 0.8
_STEADY_TIMES = 2.0
#: Of so many steps the first says little about the others; fewer say nothing about what comes again.
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One step, over all ranks. Seconds; ``hidden`` is None where nothing was sent, or nothing is marked."""

    number: int
    start: float
    end: float
    #: with anything in flight, and of that without compute beside it: means over ranks
    in_flight: float
    waited: float
    hidden: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """The calls of one line, on all ranks: how long any of them was in flight without compute beside it.

    ``total`` is summed up over ranks, not over calls that are in flight at one time.
    """

    operation: str
    lane: str
    place: str
    calls: int
    size_bytes: int
    total: float
    longest: float
    longest_rank: int
    longest_start: float


@dataclass(frozen=True, slots=True)
class Lateness:
    """How often a rank was the last to call an operation, and how long others waited for it."""

    rank: int
    last: int
    of: int
    total: float
    longest: float
    longest_operation: str
    longest_place: str
    longest_start: float
    #: what it did meanwhile; where that was not marked, ``after optimizer and before forward``
    doing: str
    #: ``total`` without the longest tenth of the times
    repeated: float = 0.0
    #: what it is late by in four of five steps (or operations, if no steps are known), times their number
    steady: float = 0.0


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it. ``hidden`` is None where nothing was sent, or nothing is ``marked``.

    ``hang`` is the call that keeps all others of ``unfinished`` from their end, and who has not made it.
    ``late`` is the rank that holds the others up, if one does. ``left_out`` is 1 if there are three steps or
    more: the first, which sets up and warms up, then does not count in ``hidden``, ``in_flight``, ``waited``,
    ``waits``, ``lateness`` and ``late``. Else it is 0.
    """

    ranks: int
    seconds: float
    operations: int
    marked: bool
    hidden: float | None
    in_flight: float
    waited: float
    steps: tuple[Step, ...]
    waits: tuple[Wait, ...]
    lateness: tuple[Lateness, ...]
    late: Lateness | None
    unfinished: tuple[Unfinished, ...]
    hang: Hang | None
    left_out: int
    #: ranks that were ended before they had written what they did last
    broken_off: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def find(parts: Sequence[Part]) -> Findings:
    """What ``parts`` say, whose times lie on one clock."""
    seconds = max((part.seconds for part in parts), default=0.0)
    marked = any(not span.is_operation for part in parts for span in part.spans)
    warm, began = _warm(parts)
    whole = _share(_times(warm, seconds), 0.0, seconds)
    lateness, unfinished = tuple(_lateness(warm)), tuple(_unfinished(parts))
    return Findings(
        ranks=len(parts),
        seconds=seconds,
        operations=sum(span.is_operation for part in parts for span in part.spans),
        marked=marked,
        hidden=whole[2],
        in_flight=whole[0],
        waited=whole[1],
        steps=tuple(_steps(parts, seconds)),
        waits=tuple(_waits(warm)),
        lateness=lateness,
        late=_late(lateness, seconds - began) if len(parts) > 1 else None,
        unfinished=unfinished,
        hang=hang(unfinished),
        left_out=int(warm is not parts),
        broken_off=tuple(part.rank for part in parts if not part.is_whole),
    )


def _warm(parts: Sequence[Part]) -> tuple[Sequence[Part], float]:
    """What began behind the first step, where that is one of several, and since when."""
    if min((len(part.steps) for part in parts), default=0) < _STEPS:
        return parts, 0.0
    later = [
        replace(part, spans=tuple(span for span in part.spans if span.start >= part.steps[0]))
        for part in parts
    ]
    return later, min(part.steps[0] for part in parts)


def _late(lateness: Sequence[Lateness], seconds: float) -> Lateness | None:
    if not lateness:
        return None
    first, others = lateness[0], lateness[1:]
    enough = _LATE_SHARE * seconds
    of_others = statistics.median(one.total for one in others)
    again = first.repeated > enough and first.repeated > _LATE_TIMES * of_others
    steadily = (
        first.steady > enough
        and first.steady > _LATE_TIMES * statistics.median(one.steady for one in others)
        and first.total > _STEADY_TIMES * of_others
    )
    return first if again or steadily else None


def _busy(spans: Iterable[Span], start: float, end: float, *, operations: bool) -> list[Interval]:
    """When there was any of a kind, within ``start`` and ``end``."""
    return covered(
        (max(start, span.start), min(end, end if span.end is None else span.end))
        for span in spans
        if span.is_operation is operations and span.start < end and (span.end is None or span.end > start)
    )


def hidden_fraction(spans: Sequence[Span], start: float, end: float) -> float:
    """The share of the time in flight that had compute beside it; ``nan`` if nobody knows."""
    busy = _busy(spans, start, end, operations=True)
    compute = _busy(spans, start, end, operations=False)
    total = length(busy)
    if not total or all(span.is_operation for span in spans):
        return math.nan
    return length(intersection(busy, compute)) / total


@dataclass(frozen=True, slots=True)
class _Times:
    """When a rank had anything in flight, and when it computed."""

    in_flight: list[Interval]
    compute: list[Interval]


def _times(parts: Iterable[Part], seconds: float) -> list[_Times]:
    return [
        _Times(*(_busy(part.spans, 0.0, seconds, operations=one) for one in (True, False)))
        for part in parts
    ]  # fmt: skip


def _share(ranks: Sequence[_Times], start: float, end: float) -> tuple[float, float, float | None]:
    """Seconds in flight and of that without compute, as means over ranks; and the share that is hidden."""
    in_flight = hidden = 0.0
    for one in ranks:
        busy = within(one.in_flight, start, end)
        in_flight += length(busy)
        hidden += length(intersection(busy, within(one.compute, start, end)))
    count = max(1, len(ranks))
    share = hidden / in_flight if in_flight and any(one.compute for one in ranks) else None
    return in_flight / count, (in_flight - hidden) / count, share


def _steps(parts: Sequence[Part], seconds: float) -> Iterable[Step]:
    """As many as every rank has ended; from the first of the ranks to the last."""
    count = min((len(part.steps) for part in parts), default=0)
    times = _times(parts, seconds)
    for number in range(count):
        begins = [part.steps[number - 1] if number else _first(part) for part in parts]
        ends = [part.steps[number] for part in parts]
        shares = [_share([rank], *when) for rank, *when in zip(times, begins, ends, strict=True)]
        in_flight = statistics.mean(share[0] for share in shares)
        waited = statistics.mean(share[1] for share in shares)
        known = any(share[2] is not None for share in shares)
        hidden = 1 - waited / in_flight if known else None
        yield Step(number, min(begins), max(ends), in_flight, waited, hidden)


def _first(part: Part) -> float:
    """When the first step began: with the first thing that was recorded."""
    return min((span.start for span in part.spans), default=0.0)


def _exposed(part: Part) -> Iterable[tuple[Span, list[Interval]]]:
    """Each operation, and when it was in flight without compute beside it."""
    idle = _gaps(_busy(part.spans, 0.0, part.seconds, operations=False), part.seconds)
    for span in part.spans:
        if span.is_operation:
            end = part.seconds if span.end is None else span.end
            yield span, within(idle, span.start, end)


def _gaps(busy: Sequence[Interval], end: float) -> list[Interval]:
    """What lies between, before ``end``."""
    starts = [0.0, *(stop for _, stop in busy)]
    stops = [*(start for start, _ in busy), end]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _waits(parts: Sequence[Part], most: int = 20) -> list[Wait]:
    """Lines by how long their calls were waited for."""
    lines: dict[tuple[str, str, str], list[tuple[Span, list[Interval], int]]] = {}
    for part in parts:
        for span, idle in _exposed(part):
            lines.setdefault((span.name, span.row, span.place), []).append((span, idle, part.rank))
    found = []
    for (name, lane, place), calls in lines.items():
        span, idle, rank = max(calls, key=lambda call: length(call[1]))
        by_rank: dict[int, list[Interval]] = {}
        for _, intervals, whose in calls:
            by_rank.setdefault(whose, []).extend(intervals)
        total = sum(length(covered(intervals)) for intervals in by_rank.values())
        size_bytes = sum(call[0].size_bytes for call in calls)
        found.append(Wait(name, lane, place, len(calls), size_bytes, total, length(idle), rank, span.start))
    return sorted(found, key=lambda wait: -wait.total)[:most]


def _calls(parts: Sequence[Part]) -> dict[object, list[tuple[Part, Span]]]:
    """Each operation that several ranks have called."""
    found: dict[object, list[tuple[Part, Span]]] = {}
    for part in parts:
        for span in part.spans:
            if span.key is not None:
                found.setdefault(span.key, []).append((part, span))
    return found


def _lateness(parts: Sequence[Part]) -> list[Lateness]:
    """Ranks by how long others have waited for them to come."""
    late: dict[int, list[tuple[float, Span, Part]]] = {part.rank: [] for part in parts}
    shared = [calls for calls in _calls(parts).values() if len(calls) > 1]
    for calls in shared:
        part, span = max(calls, key=lambda call: call[1].start)
        others = statistics.median(other.start for whose, other in calls if whose is not part)
        late[part.rank].append((span.start - others, span, part))
    found = []
    for rank, times in late.items() if shared else ():
        if not times:
            found.append(Lateness(rank, 0, len(shared), 0.0, 0.0, "", "", 0.0, ""))
            continue
        times.sort(key=lambda one: -one[0])
        seconds, span, part = times[0]
        waited = _waited_for(times)
        found.append(
            Lateness(
                rank, len(times), len(shared), length(waited), seconds, span.name, span.place, span.start,
                _doing(part, waited), length(_waited_for(times[math.ceil(_CHANCE * len(times)) :])),
                _steady(part, times, len(shared)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: -one.total)


def _waited_for(times: Iterable[tuple[float, Span, Part]]) -> list[Interval]:
    """When others waited for a rank that was late so often."""
    return covered((span.start - before, span.start) for before, span, _ in times)


def _steady(part: Part, times: Sequence[tuple[float, Span, Part]], operations: int) -> float:
    """What a rank is late by in nearly all steps, over all of them; of operations, if there are few steps."""
    several = len(part.steps) >= _STEPS
    units = len(part.steps) - 1 if several else operations
    by_unit: dict[int, list[tuple[float, Span, Part]]] = {}
    for number, one in enumerate(times):
        by_unit.setdefault(bisect_right(part.steps, one[1].start) if several else number, []).append(one)
    late = sorted((length(_waited_for(of_one)) for of_one in by_unit.values()), reverse=True)
    reached = math.ceil(_STEADILY * units)
    return late[reached - 1] * units if units >= _STEPS and reached <= len(late) else 0.0


def _doing(part: Part, late: Sequence[Interval]) -> str:
    """The compute in which most of ``late`` lies; where most is not marked, between which it lies."""
    compute = [span for span in part.spans if not span.is_operation]
    by_name: dict[str, list[Interval]] = {}
    for span in compute:
        by_name.setdefault(span.name, []).append((span.start, _end(span, part)))
    spent = {name: length(intersection(covered(times), late)) for name, times in by_name.items()}
    busy = covered((span.start, _end(span, part)) for span in compute)
    unmarked = intersection(_gaps(busy, part.seconds), late)
    best = max(spent, key=lambda name: spent[name], default="")
    return best if best and spent[best] >= length(unmarked) else _between(compute, unmarked, part)


def _between(compute: Sequence[Span], unmarked: Sequence[Interval], part: Part) -> str:
    """The compute that ends before most of ``unmarked``, and that which begins behind it."""
    ended = sorted(compute, key=lambda span: _end(span, part))
    ends, starts = [_end(span, part) for span in ended], [span.start for span in compute]
    spent: dict[str, float] = {}
    for start, end in unmarked:
        before, behind = bisect_right(ends, start), bisect_left(starts, end)
        names = [*(f"after {ended[before - 1].name}" for _ in range(before > 0))]
        names += [f"before {compute[behind].name}" for _ in range(behind < len(compute))]
        where = " and ".join(names)
        spent[where] = spent.get(where, 0.0) + end - start
    return max(spent, key=lambda where: spent[where], default="")


def _end(span: Span, part: Part) -> float:
    return part.seconds if span.end is None else span.end


def _unfinished(parts: Sequence[Part]) -> list[Unfinished]:
    """What was not over at the end, or failed, the longest first."""
    calls = _calls(parts)
    found = []
    for part in parts:
        for span in part.spans:
            if span.is_operation and (span.end is None or span.failed):
                came = {whose.rank for whose, _ in calls.get(span.key, [])}
                known = {whose.rank for whose in parts if whose.is_whole or whose.seconds > span.start}
                missing = tuple(sorted(_members(span, parts) & known - came)) if span.key else ()
                found.append(
                    Unfinished(
                        part.rank, span.name, span.row, span.sequence, span.place,
                        (part.seconds if span.end is None else span.end) - span.start, span.failed, missing,
                    )
                )  # fmt: skip
    return sorted(found, key=lambda one: -one.seconds)


def _members(span: Span, parts: Sequence[Part]) -> set[int]:
    """The ranks of the group, which a lane's row names if it is not the world."""
    _, of, ranks = span.row.rpartition(" of [")
    if of:
        return {int(rank) for rank in ranks.rstrip("]").split(",")}
    return {part.rank for part in parts}

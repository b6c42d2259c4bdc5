"""What a trace shows: the hidden share of each step, the longest waits, stragglers, what hangs.

Pure functions of parts whose times are on one clock; the page, the terminal and ``--json`` show the results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from asynccoll.flight.hanging import Hang, Unfinished, hang
from asynccoll.trace.lateness import STEPS, Lateness, late, lateness
from asynccoll.trace.parts import Part, calls, members
from asynccoll.trace.spans import Interval, Span, covered, gaps, intersection, length, within

__all__ = ["Findings", "Lateness", "Step", "Unfinished", "Wait", "find", "hidden_fraction", "warm"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step, over all ranks, in seconds; ``hidden`` is None if nothing was sent, or nothing is marked."""

    number: int
    start: float
    end: float
    #: time with anything in flight, and the part of that without concurrent compute: means over ranks
    in_flight: float
    waited: float
    hidden: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """The calls from one line, on all ranks: how long any of them was in flight without concurrent compute.

    ``total`` is summed over ranks, but not over calls that are in flight at the same time.
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
class Findings:
    """Everything that a trace shows. ``hidden`` is None if nothing was sent, or nothing is ``marked``.

    ``hang`` is the call that keeps all others in ``unfinished`` from completing, and which ranks have not
    made it. ``late`` is the rank that holds up the others, if one does. ``left_out`` is 1 if there are three
    steps or more: then the first one, which sets up and warms up, does not count in ``hidden``,
    ``in_flight``, ``waited``, ``waits``, ``lateness`` and ``late``. Otherwise it is 0. Operations that are
    ``unfinished`` do not count in ``hidden``, ``in_flight``, ``waited``, ``steps`` and ``waits``.
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
    #: ranks that ended before they had written what they did last
    broken_off: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def find(parts: Sequence[Part]) -> Findings:
    """Return the findings of ``parts``, whose times are on one clock."""
    seconds = max((part.seconds for part in parts), default=0.0)
    marked = any(not span.is_operation for part in parts for span in part.spans)
    counted, began = warm(parts)
    over = [_over(part) for part in counted]
    whole = _share(_times(over, seconds), 0.0, seconds)
    ranks, unfinished = tuple(lateness(parts, counted)), tuple(_unfinished(parts))
    return Findings(
        ranks=len(parts),
        seconds=seconds,
        operations=sum(span.is_operation for part in parts for span in part.spans),
        marked=marked,
        hidden=whole[2],
        in_flight=whole[0],
        waited=whole[1],
        steps=tuple(_steps([_over(part) for part in parts], seconds)),
        waits=tuple(_waits(over)),
        lateness=ranks,
        late=late(ranks, seconds - began) if len(parts) > 1 else None,
        unfinished=unfinished,
        hang=hang(unfinished),
        left_out=int(counted is not parts),
        broken_off=tuple(part.rank for part in parts if not part.is_whole),
    )


def warm(parts: Sequence[Part]) -> tuple[Sequence[Part], float]:
    """Return what began after the first step, if there are enough steps, else all; and since when."""
    if min((len(part.steps) for part in parts), default=0) < STEPS:
        return parts, 0.0
    later = [
        replace(part, spans=tuple(span for span in part.spans if span.start >= part.steps[0]))
        for part in parts
    ]
    return later, min(part.steps[0] for part in parts)


def _over(part: Part) -> Part:
    """Drop unfinished and failed calls: however long a hang lasts, it says nothing about the rest."""
    spans = (span for span in part.spans if not (span.is_operation and (span.end is None or span.failed)))
    return replace(part, spans=tuple(spans))


def _busy(spans: Iterable[Span], start: float, end: float, *, operations: bool) -> list[Interval]:
    """Return when there was any span of a kind, between ``start`` and ``end``."""
    return covered(
        (max(start, span.start), min(end, end if span.end is None else span.end))
        for span in spans
        if span.is_operation is operations and span.start < end and (span.end is None or span.end > start)
    )


def hidden_fraction(spans: Sequence[Span], start: float, end: float) -> float:
    """Return the share of the time in flight with concurrent compute; ``nan`` if that is unknown."""
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
    """Return seconds in flight, and those without compute, as means over ranks; and the hidden share."""
    in_flight = hidden = 0.0
    for one in ranks:
        busy = within(one.in_flight, start, end)
        in_flight += length(busy)
        hidden += length(intersection(busy, within(one.compute, start, end)))
    count = max(1, len(ranks))
    share = hidden / in_flight if in_flight and any(one.compute for one in ranks) else None
    return in_flight / count, (in_flight - hidden) / count, share


def _steps(parts: Sequence[Part], seconds: float) -> Iterable[Step]:
    """Yield the steps that every rank has ended, each from its first begin on any rank to its last end."""
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
    """Return when the first step began: with the first recorded span."""
    return min((span.start for span in part.spans), default=0.0)


def _exposed(part: Part) -> Iterable[tuple[Span, list[Interval]]]:
    """Yield each operation, and when it was in flight without concurrent compute."""
    idle = gaps(_busy(part.spans, 0.0, part.seconds, operations=False), part.seconds)
    for span in part.spans:
        if span.is_operation:
            yield span, within(idle, span.start, part.end_of(span))


def _waits(parts: Sequence[Part], most: int = 20) -> list[Wait]:
    """Return the lines whose calls were waited for longest."""
    lines: dict[tuple[str, str, str], list[tuple[Span, list[Interval], int]]] = {}
    for part in parts:
        for span, idle in _exposed(part):
            lines.setdefault((span.name, span.row, span.place), []).append((span, idle, part.rank))
    found = []
    for (name, lane, place), made in lines.items():
        span, idle, rank = max(made, key=lambda call: length(call[1]))
        by_rank: dict[int, list[Interval]] = {}
        for _, intervals, whose in made:
            by_rank.setdefault(whose, []).extend(intervals)
        total = sum(length(covered(intervals)) for intervals in by_rank.values())
        size_bytes = sum(call[0].size_bytes for call in made)
        found.append(Wait(name, lane, place, len(made), size_bytes, total, length(idle), rank, span.start))
    return sorted(found, key=lambda wait: -wait.total)[:most]


def _unfinished(parts: Sequence[Part]) -> list[Unfinished]:
    """Return what was not over at the end, or failed, the longest first."""
    made = calls(parts)
    known_until = {part.rank: math.inf if part.is_whole else part.seconds for part in parts}
    absent: dict[object, list[int]] = {}  # by operation, as many ranks may wait in one
    found = []
    for part in parts:
        for span in part.spans:
            if span.is_operation and (span.end is None or span.failed):
                if span.key and span.key not in absent:
                    came = {whose.rank for whose, _ in made[span.key]}
                    absent[span.key] = sorted(members(span, parts) & known_until.keys() - came)
                missing = tuple(r for r in absent.get(span.key, ()) if known_until[r] > span.start)
                found.append(
                    Unfinished(
                        part.rank, span.name, span.row, span.sequence, span.place,
                        part.end_of(span) - span.start, span.failed, missing,
                    )
                )  # fmt: skip
    return sorted(found, key=lambda one: -one.seconds)

"""Which rank called each operation last, and how long the others had waited for it by then.

This is computed from recordings of a whole run (``ASYNCCOLL_TRACE``), whose times are on one clock, or from
dumps of flight recorders: these have the last operations, on ranks of one host, which read one clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asynccoll.flight.comparing import members
from asynccoll.flight.dumps import read_dumps
from asynccoll.trace.advice import advice
from asynccoll.trace.findings import warm
from asynccoll.trace.lateness import Arrival, Called, arrival, arrivals, waited_for
from asynccoll.trace.merged import load
from asynccoll.trace.spans import length
from asynccoll.trace.spooling import recordings


@dataclass(frozen=True, slots=True)
class Straggling:
    """The operations of one kind that ``rank`` was the last to call, on one line.

    They are ``last`` of the ``calls`` of this kind. ``total``, ``median`` and ``longest``: seconds that the
    median of the other ranks waited in them, counted as in `trace run`.
    """

    operation: str
    lane: str
    place: str
    rank: int
    calls: int
    last: int
    total: float
    median: float
    longest: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The arrivals that count in a directory, and what `trace run` says about it ("" for dumps)."""

    arrivals: tuple[Arrival, ...]
    left_out: int
    verdict: str


def load_stragglers(directory: Path) -> Stragglers:
    """Load the operations in ``directory`` that more than one rank, and all recorded of its group, called.

    Raises:
        InvalidArgumentError: there is neither a recording nor a dump.
    """
    if not recordings(directory):
        return Stragglers(tuple(_of_dumps(directory)), 0, "")
    trace = load(directory)
    counted, _ = warm(trace.parts)
    return Stragglers(tuple(arrivals(counted)), trace.findings.left_out, advice(trace.findings))


def _of_dumps(directory: Path) -> Iterator[Arrival]:
    calls: dict[tuple[object, ...], list[Called]] = {}
    flights = read_dumps(directory).flights
    for rank, recorded in flights.items():
        for call in recorded.calls:
            if call.sequence:
                known = (call.operation, call.lane, call.group, call.lane_key, call.sequence, call.part)
                calls.setdefault(known, []).append((rank, call.called, call.place))
    for (operation, lane, group, *_), made in calls.items():
        if len(made) > 1 and members(flights, str(group)).keys() <= {rank for rank, *_ in made}:
            yield arrival(str(operation), str(lane), made)


def by_line(made: Iterable[Arrival]) -> list[Straggling]:
    """Group arrivals by kind, line and the rank that was last; those that cost the others most come first."""
    kinds: dict[tuple[str, str], int] = {}
    late: dict[tuple[str, str, str, int], list[Arrival]] = {}
    for one in made:
        kinds[one.operation, one.lane] = kinds.get((one.operation, one.lane), 0) + 1
        late.setdefault((one.operation, one.lane, one.place, one.rank), []).append(one)
    found = [_straggling(times, kinds[who[0], who[1]]) for who, times in late.items()]
    return sorted(found, key=lambda one: -one.total)


def _straggling(times: Sequence[Arrival], calls: int) -> Straggling:
    first, waits = times[0], [one.late for one in times]
    return Straggling(
        first.operation, first.lane, first.place, first.rank, calls, len(times),
        length(waited_for(times)), statistics.median(waits), max(waits),
    )  # fmt: skip

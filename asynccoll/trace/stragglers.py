"""Of each operation, which rank called it last, and how long the others had waited for it by then.

From recordings of a whole run (``ASYNCCOLL_TRACE``), whose times lie on one clock, or from dumps of flight
recorders: the last operations, of ranks of one host, which read one clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asynccoll.flight.dumps import read_dumps
from asynccoll.trace.merged import load
from asynccoll.trace.spooling import recordings

__all__ = ["Arrival", "Straggling", "by_line", "load_arrivals"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One operation: who called it last, on which line, and how many seconds after the first."""

    operation: str
    lane: str
    sequence: int
    last: int
    place: str
    late: float


@dataclass(frozen=True, slots=True)
class Straggling:
    """The operations of one kind that ``rank`` was the last to call on one line.

    ``last`` of the ``calls`` of this kind; ``total``, ``median`` and ``longest``: seconds that who came first
    waited in them.
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

    def to_dict(self) -> dict[str, object]:
        """For programs."""
        return asdict(self)


#: Operation, lane, place in its order, and what else tells it from others.
_Known = tuple[str, str, int, object]
#: One rank's part in an operation: rank, when it called, line.
_Call = tuple[int, float, str]


def load_arrivals(directory: Path) -> list[Arrival]:
    """Every operation in ``directory`` that more than one rank has called.

    Raises:
        InvalidArgumentError: there is neither a recording nor a dump.
    """
    calls: dict[_Known, list[_Call]] = {}
    if recordings(directory):
        for part in load(directory).parts:
            for span in part.spans:
                if span.key is not None:
                    known: _Known = (span.name, span.row, span.sequence, span.key)
                    calls.setdefault(known, []).append((part.rank, span.start, span.place))
    else:
        for rank, recorded in read_dumps(directory).flights.items():
            for call in recorded.calls:
                if call.sequence:
                    known = (call.operation, call.lane, call.sequence, (call.group, call.lane_key, call.part))
                    calls.setdefault(known, []).append((rank, call.called, call.place))
    return [_arrival(known, made) for known, made in calls.items() if len(made) > 1]


def _arrival(known: _Known, made: Sequence[_Call]) -> Arrival:
    rank, called, place = max(made, key=lambda call: call[1])
    operation, lane, sequence, _ = known
    return Arrival(operation, lane, sequence, rank, place, called - min(call[1] for call in made))


def by_line(arrivals: Iterable[Arrival]) -> list[Straggling]:
    """By kind, line and rank that came last; those that cost the others most first."""
    kinds: dict[tuple[str, str], int] = {}
    late: dict[tuple[str, str, str, int], list[float]] = {}
    for one in arrivals:
        kinds[one.operation, one.lane] = kinds.get((one.operation, one.lane), 0) + 1
        late.setdefault((one.operation, one.lane, one.place, one.last), []).append(one.late)
    found = [
        Straggling(*who, kinds[who[0], who[1]], len(times), sum(times), statistics.median(times), max(times))
        for who, times in late.items()
    ]
    return sorted(found, key=lambda one: -one.total)

"""Which ranks a job that hangs waits for: one verdict, over calls that are not over.

Pure. Where ranks wait for each other in a circle, each call alone blames somebody else: rank 1 has left out a
call, in which ranks 0 and 2 wait; then it waits in its next call, which those two have not made. ``hang``
tells the first of these from what follows from it. Flights or recordings of the ranks go in; the sentence is
the same whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asynccoll.flight.comparing import members, partings
from asynccoll.flight.reading import Call, Flight
from asynccoll.host.call_number import call_name
from asynccoll.host.words import duration, listed

__all__ = ["Hang", "Unfinished", "hang", "hang_of"]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation that was not over at the end, or failed; and who of its group had not called it."""

    rank: int
    operation: str
    lane: str
    sequence: int
    place: str
    seconds: float
    failed: bool
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hang:
    """``ranks`` have not made a call in which ``waiting`` wait, the first of them for ``seconds``.

    ``refused``: how it was refused there, "" if they have not called it.
    """

    ranks: tuple[int, ...]
    operation: str
    lane: str
    sequence: int
    place: str
    waiting: tuple[int, ...]
    seconds: float
    failed: bool
    refused: str = ""

    def __str__(self) -> str:
        waits = "waited" if self.failed else f"{_has(self.waiting)} waited"
        call = f"{call_name(self.operation, self.sequence)} on lane {self.lane!r}"
        waiting = f"in which {listed(self.waiting)} {waits} {duration(self.seconds)} ({self.place})"
        if self.refused:
            return f"{listed(self.ranks)} refused {call}, {waiting}: {self.refused}"
        return f"{listed(self.ranks)} {_has(self.ranks)} not called {call}, {waiting}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def hang(unfinished: Iterable[Unfinished]) -> Hang | None:
    """Who keeps the job from going on; None if every rank has made each call that others wait in."""
    waits = [one for one in unfinished if one.missing]
    if not waits:
        return None
    waiting = {one.rank for one in waits}
    # Who waits for another rank is held up itself. In a circle that is everybody: then those that are fewer
    # have gone another way, and of two such the one for whom others have waited longer.
    first = min(waits, key=lambda one: (not waiting.isdisjoint(one.missing), len(one.missing), -one.seconds))
    same = [
        one for one in waits
        if (one.operation, one.lane, one.sequence) == (first.operation, first.lane, first.sequence)
    ]  # fmt: skip
    return Hang(
        first.missing, first.operation, first.lane, first.sequence, first.place,
        tuple(sorted({one.rank for one in same})), first.seconds, first.failed,
    )  # fmt: skip


def hang_of(flights: Mapping[int, Flight], now: Mapping[int, float] | None = None) -> Hang | None:
    """The same over what the ranks have recorded, by rank; ``now`` is the monotonic clock of each.

    Without it, the moment of the last thing that any of them has recorded. None as well where calls that
    ranks wait in are different ones: then nobody waits for a rank that has not called.
    """
    for parting in partings(flights):
        made = [call for call in parting.calls.values() if call is not None and not call.was_refused]
        if parting.kind == "different" and any(call.state != "finished" for call in made):
            return None
    unfinished = list(_unfinished(flights, _moments(flights) if now is None else now))
    found = hang(one for one, _ in unfinished)
    return None if found is None else replace(found, refused=_refused(found, flights, unfinished))


def _refused(
    found: Hang, flights: Mapping[int, Flight], unfinished: Iterable[tuple[Unfinished, Call]]
) -> str:
    """How those that have not made the call in which others wait have refused it, if all of them have."""
    for one, call in unfinished:
        if (one.missing, one.place, one.sequence) == (found.ranks, found.place, found.sequence):
            calls = [_refused_at(call, flights[rank]) for rank in found.ranks]
            return calls[0].refusal(call.operation) if calls[0] is not None and all(calls) else ""
    return ""


def _refused_at(call: Call, flight: Flight) -> Call | None:
    return flight.refused(call.group, call.lane_key, call.sequence, call.part)


def _moments(flights: Mapping[int, Flight]) -> dict[int, float]:
    """For each rank the last moment that any has recorded, by its own clock."""
    walls = {rank: one.wall - one.began for rank, one in flights.items()}
    latest = max((_latest(one) + walls[rank] for rank, one in flights.items()), default=0.0)
    return {rank: latest - wall for rank, wall in walls.items()}


def _latest(one: Flight) -> float:
    return max((one.ended, *(max(call.called, call.ended) for call in one.calls)))


def _unfinished(flights: Mapping[int, Flight], now: Mapping[int, float]) -> Iterator[tuple[Unfinished, Call]]:
    for rank, one in flights.items():
        for call in one.calls:
            if call.sequence and call.state not in ("finished", "refused"):
                end = call.ended if call.failure else now[rank]
                lane = call.lane if call.group == "world" else f"{call.lane} of {_ranks(call.group)}"
                told = Unfinished(
                    rank, call.operation, lane, call.sequence, call.place, max(0.0, end - call.called),
                    bool(call.failure), _missing(call, flights),
                )  # fmt: skip
                yield told, call


def _ranks(group: str) -> str:
    return f"[{group.replace('-', ', ')}]"


def _missing(call: Call, flights: Mapping[int, Flight]) -> tuple[int, ...]:
    """Who of the group has recorded less of the lane, which it may have closed since, or refused the call."""
    lane = call.group, call.lane_key
    return tuple(
        rank
        for rank, one in members(flights, call.group).items()
        if max(one.reached(*lane), *(made.sequence for made in one.on_lane(*lane)), 0) < call.sequence
        or _refused_at(call, one) is not None
    )

"""Find where ranks of a job diverge: the first place of each lane at which they did not call the same thing.

The functions are pure: they take the flights of the ranks, read from memory or from dumps. Only places that
are still recorded on every rank that has used the lane can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from asynccoll.flight.layout import is_cut
from asynccoll.flight.reading import Call, Flight
from asynccoll.host.call_number import numbered
from asynccoll.host.words import by_text, listed, ranks_of

#: The kinds of ``Parting``, in the order in which they are reported.
_KINDS = ("different", "refused", "absent")


@dataclass(frozen=True, slots=True)
class Strayed:
    """The first place of a lane at which ranks made the same call from different lines.

    If a rank has skipped one of several identical calls, that was here or just before: its later calls are
    paired with the other ranks' next ones, and differ only at the end.
    """

    sequence: int
    places: Mapping[int, str]
    #: whether the place before it is recorded, and was called from one line
    exact: bool

    @property
    def comes_late(self) -> bool:
        """Whether an earlier call came from one line; else the ranks run different code from the start."""
        return self.exact and self.sequence > 1

    @property
    def hint(self) -> str:
        """What it suggests, in words."""
        return f"a rank may have skipped an earlier call: {self}"

    def __str__(self) -> str:
        told = by_line(self.places)
        if not self.exact:
            return f"at {numbered(self.sequence)}, where the recorded calls begin, or before: {told}"
        return f"likely at {numbered(self.sequence)}, the first that was called from different lines: {told}"


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place of a lane at which ranks diverge, ``agreed + 1``, with what each rank called there.

    ``calls`` has None for a rank that has called nothing there, and lacks ranks whose call is not known.
    ``kind`` is ``"different"`` (in operation, shape, dtype, reduction or root), ``"refused"`` (some rank has
    refused its own call) or ``"absent"`` (some have called, some have not). ``strayed``: where calls that
    agreed came from different lines, if some did.
    """

    kind: str
    group: str
    lane: str
    agreed: int
    calls: Mapping[int, Call | None]
    strayed: Strayed | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not called."""
        return tuple(rank for rank, call in self.calls.items() if call is None)

    def sides(self) -> list[tuple[tuple[int, ...], str]]:
        """Return the ranks of each side, and what they called: the same thing on the same line."""
        found: dict[str, list[int]] = {}
        for rank, call in self.calls.items():
            found.setdefault("has not called" if call is None else _told(call), []).append(rank)
        return [(tuple(ranks), text) for text, ranks in found.items()]

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON values, for programs."""
        return {
            "kind": self.kind,
            "group": self.group,
            "lane": self.lane,
            "agreed": self.agreed,
            "sides": [{"ranks": list(ranks), "called": text} for ranks, text in self.sides()],
            "strayed": None if self.strayed is None else asdict(self.strayed),
        }

    def __str__(self) -> str:
        sides = "; ".join(f"{listed(ranks)}: {text}" for ranks, text in self.sides())
        return f"{self.where}, {numbered(self.agreed + 1)}: {sides}"

    @property
    def hint(self) -> str:
        """A hint that a rank may have skipped a call earlier, if the calling lines suggest it; else ""."""
        return "" if self.strayed is None else self.strayed.hint

    @property
    def where(self) -> str:
        """The lane in words: ``lane 'eval'``, or ``lane 'eval' of ranks 0, 2``."""
        of = "" if self.group == "world" else f" of ranks {ranks_of(self.group)}"
        return f"lane {self.lane!r}{of}"


def by_line(places: Mapping[int, str]) -> str:
    """Describe the lines of ranks: ``train.py:8 on ranks 0, 2, train.py:12 on rank 1``."""
    return ", ".join(f"{place} on {who}" for who, place in by_text(places, places.values()))


def partings(flights: Mapping[int, Flight]) -> list[Parting]:
    """Return the parting of each lane on which the ranks diverge; those with different calls first."""
    lanes = {
        (call.group, call.lane_key): call.lane
        for one in flights.values()
        for call in one.calls
        if call.sequence
    }
    found = [
        one for (group, key), lane in lanes.items() if (one := parting(flights, group, key, lane)) is not None
    ]
    return sorted(found, key=lambda one: _KINDS.index(one.kind))


def members(flights: Mapping[int, Flight], group: str) -> dict[int, Flight]:
    """Return those of ``flights`` that are in the group with this key: ``world``, or ranks, as in ``0-2-5``.

    A key that was cut has only the last ranks; the first ones are recognized by having used the group.
    """
    ranks, cut = set(group.split("-")), is_cut(group)
    return {
        rank: one
        for rank, one in sorted(flights.items())
        if group == "world" or str(rank) in ranks or (cut and one.has_used(group))
    }


def strayed(flights: Mapping[int, Flight], group: str, key: str) -> Strayed | None:
    """Find where calls strayed (``Strayed``); None if all recorded common calls came from the same lines."""
    made = {rank: _by_place(one, group, key) for rank, one in members(flights, group).items()}
    common = set.intersection(*map(set, made.values())) if made else set()
    for place in sorted(common):
        lines = {rank: places[place][0].place for rank, places in made.items()}
        if len(set(lines.values())) > 1:
            return Strayed(place, lines, place == 1 or place > min(common))
    return None


def parting(flights: Mapping[int, Flight], group: str, key: str, lane: str) -> Parting | None:
    """Return the parting of the lane with this key and name; None if the ranks do not diverge there."""
    flights = members(flights, group)
    made = {rank: _by_place(one, group, key) for rank, one in flights.items()}
    # If a rank's calls there have all been overwritten by others, only what comes after them is known.
    begins = [
        min(places) if places else flights[rank].reached(group, key) + 1 for rank, places in made.items()
    ]
    first = max(begins, default=1)
    for place in sorted({place for places in made.values() for place in places if place >= first}):
        # A rank that is further on has called there, but its call is no longer recorded, or was not sent.
        known = {
            rank: places.get(place, [])
            for rank, places in made.items()
            if place in places or flights[rank].reached(group, key) < place
        }
        for calls in _parts(known):
            if kind := _kind(calls):
                before = strayed(flights, group, key)
                agreed = before if before is not None and before.sequence < place else None
                return Parting(kind, group, lane, place - 1, calls, agreed)
    return None


def _by_place(one: Flight, group: str, key: str) -> dict[int, list[Call]]:
    found: dict[int, list[Call]] = {}
    for call in one.on_lane(group, key):
        if call.sequence:
            found.setdefault(call.sequence, []).append(call)
    return found


def _parts(calls: Mapping[int, list[Call]]) -> Iterator[dict[int, Call | None]]:
    """Yield each part of a call, by rank; a rank that has begun the call may not have made all parts yet."""
    for number in range(max(map(len, calls.values()))):
        yield {
            rank: made[number] if number < len(made) else None
            for rank, made in calls.items()
            if number == 0 or number < len(made)
        }


def _kind(calls: Mapping[int, Call | None]) -> str:
    made = [call for call in calls.values() if call is not None and not call.was_refused]
    if len({(call.operation, call.of) for call in made}) > 1:
        return "different"
    if not made or len(made) == len(calls):
        return ""
    return "absent" if None in calls.values() else "refused"


def _told(call: Call) -> str:
    why = f", refused there: {call.failure}" if call.was_refused else ""
    return f"{call.told}{why}"

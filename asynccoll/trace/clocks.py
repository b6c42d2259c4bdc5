"""One clock for all ranks, from what was recorded: who had to be there before an operation could end.

No rank's all_reduce is over before every rank has called it. So of each such operation, with clocks that run
alike, the start on rank a lies before the end on rank b: many of them leave little room for the difference
between two clocks. Half of that room is how far off a time may be. Pure: times in, offsets out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["SYNCHRONIZING", "Alignment", "Clock", "align"]

#: Those that end nowhere before they have begun everywhere. In an all_to_all a rank may send one nothing.
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})


@dataclass(frozen=True, slots=True)
class Clock:
    """One rank's: which clock it reads, the wall's time at the moment 0, and its synchronizing operations."""

    name: str
    wall: float
    #: start and end by what the operation has in common with its peers'; empty if ends tell nothing
    operations: Mapping[Hashable, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Alignment:
    """What to add to each rank's times, and how far off they may be; None if only wall clocks tell."""

    offsets: tuple[float, ...]
    uncertain: float | None


def align(clocks: Sequence[Clock]) -> Alignment:
    """To the clock of the first rank."""
    if not clocks:
        return Alignment((), 0.0)
    found: dict[str, tuple[float, float | None]] = {clocks[0].name: (0.0, 0.0)}
    for clock in clocks:
        if clock.name not in found:
            found[clock.name] = _offset(clock.name, clocks)
    offsets = tuple(found[clock.name][0] for clock in clocks)
    margins = [margin for _, margin in found.values()]
    known = [margin for margin in margins if margin is not None]
    return Alignment(offsets, max(known) if len(known) == len(margins) else None)


def _offset(name: str, clocks: Sequence[Clock]) -> tuple[float, float | None]:
    """From every pair of ranks, one of them on the clock ``name`` and one on the first rank's."""
    first = clocks[0]
    ours, theirs = _extremes(clocks, first.name), _extremes(clocks, name)
    if not (common := ours.keys() & theirs.keys()):
        wall = next(clock.wall for clock in clocks if clock.name == name)
        return wall - first.wall, None
    least = max(ours[key][0] - theirs[key][1] for key in common)
    most = min(ours[key][1] - theirs[key][0] for key in common)
    return (least + most) / 2, abs(most - least) / 2


def _extremes(clocks: Sequence[Clock], name: str) -> dict[Hashable, tuple[float, float]]:
    """Of each operation, the latest start and the earliest end on the clock ``name``."""
    found: dict[Hashable, tuple[float, float]] = {}
    for clock in clocks:
        if clock.name == name:
            for key, (start, end) in clock.operations.items():
                latest, earliest = found.get(key, (start, end))
                found[key] = max(start, latest), min(end, earliest)
    return found

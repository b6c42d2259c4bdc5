"""Align the clocks of all ranks, from recorded operations that cannot end before all ranks have called them.

No rank's all_reduce is over before every rank has called it. So for each such operation the start on rank a
lies before the end on rank b: if the clocks run at the same rate, many operations leave little room for the
offset between two clocks. A time may be off by half of that room. Pure: times in, offsets out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

#: Operations that end nowhere before they have begun everywhere. Not all_to_all: a rank may send nothing.
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})


@dataclass(frozen=True, slots=True)
class Clock:
    """One rank's clock: its name, the wall clock time when it was 0, the rank's synchronizing operations."""

    name: str
    wall: float
    #: start and end, by a key that is the same on all ranks; empty if ends say nothing about other ranks
    operations: Mapping[Hashable, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Alignment:
    """The offset to add to each rank's times, and how far off they may be; None if only wall clocks tell."""

    offsets: tuple[float, ...]
    uncertain: float | None


def align(clocks: Sequence[Clock]) -> Alignment:
    """Align all clocks to that of the first rank."""
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
    """Return offset and margin, from all pairs of a rank on the clock ``name`` and one on the first clock."""
    first = clocks[0]
    ours, theirs = _extremes(clocks, first.name), _extremes(clocks, name)
    if not (common := ours.keys() & theirs.keys()):
        wall = next(clock.wall for clock in clocks if clock.name == name)
        return wall - first.wall, None
    least = max(ours[key][0] - theirs[key][1] for key in common)
    most = min(ours[key][1] - theirs[key][0] for key in common)
    return (least + most) / 2, abs(most - least) / 2


def _extremes(clocks: Sequence[Clock], name: str) -> dict[Hashable, tuple[float, float]]:
    """Return each operation's latest start and earliest end on the clock ``name``."""
    found: dict[Hashable, tuple[float, float]] = {}
    for clock in clocks:
        if clock.name == name:
            for key, (start, end) in clock.operations.items():
                latest, earliest = found.get(key, (start, end))
                found[key] = max(start, latest), min(end, earliest)
    return found

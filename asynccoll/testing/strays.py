"""Calls of a simulation that were paired although ranks made them from different lines of the program.

If a rank skips one of several equal calls, its next one takes that place: nothing fails, and results mix
different calls. In a real job, too little is known to tell that from a branch that the program intends, until
ranks have been a call apart for a while (``flight.shifting``). Here every call is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from asynccoll.flight import by_line
from asynccoll.host.call_number import call_name, numbered
from asynccoll.host.words import lane_name
from asynccoll.trace.recorder import row_of

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation
    from asynccoll.trace import Timeline

__all__ = ["Stray", "Strays", "merged", "told"]

#: How many of them the text of a report lists.
_MOST_TOLD = 3
_MEANING = (
    "calls made from different lines were paired; unless a branch of the program intends it, a rank has "
    "skipped a call there, or made one more, and results mix different calls:"
)


@dataclass(frozen=True)
class Stray:
    """Paired calls of one operation on one lane that ranks made from different lines, always the same ones.

    ``sequence`` is the place of the first of these calls, ``times`` is how many there are, and ``places`` has
    the line of each rank.
    """

    operation: str
    lane: str
    sequence: int
    times: int
    places: Mapping[int, str]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same calls at other places, and in other simulations."""
        return self.operation, self.lane, *self.places.items()

    def __str__(self) -> str:
        where = by_line(self.places)
        if self.times == 1:
            name = call_name(self.operation, self.sequence)
            return f"{name} on {self.lane} was made from different lines: {where}"
        return (
            f"{self.times:,} calls of {self.operation} on {self.lane}, the first {numbered(self.sequence)}, "
            f"were made from different lines: {where}"
        )


def merged(strays: Iterable[Stray]) -> list[Stray]:
    """Merge the strays that have the same lines, in the order in which they were first seen."""
    found: dict[tuple[object, ...], Stray] = {}
    for one in strays:
        known = found.get(one.key)
        found[one.key] = one if known is None else replace(known, times=known.times + one.times)
    return list(found.values())


def told(strays: Iterable[Stray], wrong: str = "") -> str:
    """Return what ``strays`` mean, and a line for each of the first; "" if ``wrong`` has all of them."""
    lines = [f"    {one}" for one in strays if str(one) not in wrong]
    if not lines:
        return ""
    if len(lines) > _MOST_TOLD:
        lines[_MOST_TOLD:] = [f"    and {len(lines) - _MOST_TOLD} more: see .strays"]
    return "\n".join((_MEANING, *lines))


#: World, lane (its row in a timeline, and its key), place and operation.
_Key = tuple[int, str, str, int, str]


class Strays:
    """What the ranks of a simulation call, by place.

    Which of the calls failed is in the timelines.
    """

    def __init__(self) -> None:
        self._places: dict[_Key, dict[int, str]] = {}
        self._lanes: dict[_Key, str] = {}

    def observer(self, world: int, rank: int) -> Callable[[Operation, int], None]:
        """Return an observer (``Context.observe``); ``world`` numbers those that ranks join in succession."""
        return partial(self._observe, world, rank)

    def _observe(self, world: int, rank: int, operation: Operation, _: int) -> None:
        if operation.sequence and operation.part == 1:  # a message's two ends have different lines
            lane = operation.lane
            key = (world, row_of(operation), lane.key, operation.sequence, operation.name)
            self._lanes[key] = lane_name(lane.name, lane.group.key)
            self._places.setdefault(key, {})[rank] = str(operation.place)

    def found(self, timelines: Mapping[int, Timeline]) -> list[Stray]:
        """Return the strays among the calls that did not fail."""
        differ = [(key, places) for key, places in self._places.items() if len(set(places.values())) > 1]
        if not differ:
            return []
        failed = {
            (rank, span.row, span.lane_key, span.sequence, span.name)
            for rank, timeline in timelines.items()
            for span in timeline.spans
            if span.failed
        }
        return merged(
            Stray(name, self._lanes[key], sequence, 1, {rank: places[rank] for rank in sorted(places)})
            for key, places in differ
            for (*_, sequence, name) in [key]
            if not any((rank, *key[1:]) in failed for rank in places)
        )

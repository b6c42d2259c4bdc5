"""The warning that this rank and the next one are a call apart, so that results mix different calls.

Each rank compares itself with only one other member of a group, the next one on its node: if any of them are
a call apart, then two neighbors are. It reads the flight recorders of both, so no rank is asked and no call
is delayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from asynccoll.flight import Comparison, Recorder, Shift, lane_id, made
from asynccoll.health.stalls import say

_log = logging.getLogger("asynccoll.shift")
#: How many lanes are remembered before the oldest is forgotten, as it is not known here which were closed.
_MOST_LANES = 1024


class Members(Protocol):
    """What this module needs of a group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its members' global ranks."""

    @property
    def key(self) -> str:
        """Its name, the same on all members."""


class Shifts:
    """The comparisons of one rank with its neighbors."""

    def __init__(
        self, rank: int, recorder: Recorder, seen: Callable[[tuple[int, ...]], Mapping[int, memoryview]]
    ) -> None:
        """``seen`` returns the recorders' memory of those of the given ranks that are on this node."""
        self._rank = rank
        self._recorder = recorder
        self._seen = seen
        self._turn = 0
        self._looked: dict[int, int] = {}  # by neighbor, this rank's newest ticket at the last look
        #: by neighbor and lane; None once a warning was given
        self._lanes: dict[tuple[int, str, str], Comparison | None] = {}

    def look(self, groups: Iterable[Members], *, at_all: bool = False) -> None:
        """Warn once about each lane on which this rank and a neighbor are a call apart.

        If there are several neighbors, each call looks at the next one, or ``at_all`` of them.
        """
        neighbours = self._neighbours(groups)
        chosen = list(neighbours)
        if chosen and not at_all:
            self._turn += 1
            chosen = [chosen[self._turn % len(chosen)]]
        for rank in chosen:
            memory, keys = neighbours[rank]
            newest = self._recorder.newest
            if self._looked.get(rank) != newest:
                self._looked[rank] = newest
                for found in self._compare(rank, memory, keys):
                    say(_log, str(found))

    def _neighbours(self, groups: Iterable[Members]) -> dict[int, tuple[memoryview, list[str]]]:
        """Return the next rank of each group, with its memory and the keys of the groups where it is next."""
        found: dict[int, tuple[memoryview, list[str]]] = {}
        for group in groups:
            near = self._seen(tuple(rank for rank in group.ranks if rank > self._rank))
            if self._rank in group.ranks and near:
                rank = min(near)
                found.setdefault(rank, (near[rank], []))[1].append(lane_id(group.key, "")[0])
        return found

    def _compare(self, rank: int, memory: memoryview, keys: list[str]) -> list[Shift]:
        mine, theirs = made(self._recorder.buffer), made(memory)
        shifts = []
        for lane in [lane for lane in mine if lane[0] in keys and lane in theirs]:
            key = rank, *lane  # the neighbor on a lane changes if a nearer rank's memory is opened later
            comparison = self._lanes.setdefault(key, Comparison((self._rank, rank)))
            found = None if comparison is None else comparison.look(mine[lane], theirs[lane])
            if found is not None:
                self._lanes[key] = None
                shifts.append(found)
        for key in list(self._lanes)[:-_MOST_LANES]:
            del self._lanes[key]
        return shifts

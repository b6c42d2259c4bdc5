"""The numbers of a lane's collectives: each call takes the next place, and the parts of one call share one.

``cut`` explains places and parts, ``host.call_number`` child tasks and rounds. This module must not know what
is issued, or when. Places change with the lane's lock held, except at the end of a call in parts
(``Lane.together``), which Ctrl-C must not prevent; they may be read without the lock.
"""

from __future__ import annotations

from asynccoll.host.call_number import CHILD, ROUND
from asynccoll.order.job import What

#: The last places of this many child tasks are kept: ranks are never that many children apart.
_ENDS = 16


class Places:
    """The places assigned so far on one lane."""

    __slots__ = ("ends", "latest", "part", "shared", "whole")

    def __init__(self, child: int = 0, rounds: int = 0) -> None:
        """``child``: how many child tasks that had the lane have ended; ``rounds``: how often they joined."""
        self.latest: int = child * CHILD + rounds * ROUND
        #: the last place of each of the most recent children that have ended, by the child's number
        self.ends: dict[int, int] = {one: one * CHILD for one in range(max(0, child - _ENDS), child)}
        self.part: int = 0  # the latest part at the latest place
        self.shared: bool = False  # operations accepted now are parts at the latest place
        self.whole: What = None  # the description of the call that they are parts of

    def take(self) -> int:
        """Take the place of an operation that is accepted now, and set ``part`` to its part there."""
        if self.shared:
            self.part += 1
            return self.latest
        self.part = 1
        self.latest = latest = self.latest + 1
        return latest

    def next(self, what: What) -> tuple[What, int, int, bool]:
        """Return the next operation's full description, place and part, and whether it shares that place."""
        if self.shared:
            return self.named(what), self.latest, self.part + 1, True
        return what, self.latest + 1, 1, False

    def open(self, count: int = 1) -> int:
        """Take a place that has no part yet, for a call in parts, or ``count`` of them, for refused calls.

        Returns the first one.
        """
        self.latest += count
        self.part = 0
        return self.latest - count + 1

    def named(self, what: What) -> What:
        """Return an operation's description, with that of the call that it is a part of, if any."""
        return (self.whole, what) if self.shared else what

    def have_come_to(self, place: int, stands: int) -> bool:
        """Whether all places below ``place`` have been assigned, and ``stands`` parts at ``place``."""
        return (self.latest, self.part) >= ((place, stands) if stands else (place - 1, 0))

    def next_round(self) -> None:
        """Continue at the next multiple of ``ROUND``."""
        self.latest += ROUND - self.latest % ROUND

    def next_child(self) -> int:
        """Continue with the next child task's calls. Returns the first place the last child did not use."""
        child = self.latest // CHILD
        self.ends[child] = self.latest
        self.ends.pop(child - _ENDS, None)
        rounds = self.latest % CHILD // ROUND
        missed, self.latest = self.latest + 1, (child + 1) * CHILD + rounds * ROUND
        self.part = 0
        return missed

"""The numbers of a lane's collectives: each has a place in its order, and parts of one call share one.

It must not know what is issued, nor when. All of it is used with the lane's lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccoll.host.call_number import CHILD, ROUND

if TYPE_CHECKING:
    from asynccoll.order.job import What

__all__ = ["Places"]

#: Of how many child tasks it is known where they ended: ranks are not that far apart.
_ENDS = 16


class Places:
    """Those that were given out so far."""

    __slots__ = ("ends", "latest", "part", "shared", "whole")

    def __init__(self, child: int = 0) -> None:
        """``child``: how many child tasks have ended that had the lane."""
        self.latest: int = child * CHILD
        #: the last place of each of the latest children that have ended
        self.ends: dict[int, int] = {one: one * CHILD for one in range(max(0, child - _ENDS), child)}
        self.part: int = 0  # of those at the latest place
        self.shared: bool = False  # what is accepted now shares that place
        self.whole: What = None  # what the call that takes it is

    def take(self) -> int:
        """The place of a call that is accepted now; ``part`` is which of those there it is."""
        if self.shared:
            self.part += 1
            return self.latest
        self.part = 1
        self.latest = latest = self.latest + 1
        return latest

    def next(self, what: What) -> tuple[What, int, int, bool]:
        """What ``what`` is as a call that is accepted now, its place and part, and whether it shares that."""
        if self.shared:
            return self.named(what), self.latest, self.part + 1, True
        return what, self.latest + 1, 1, False

    def open(self) -> int:
        """A place that parts are to share, or whose call is not made."""
        self.latest += 1
        self.part = 0
        return self.latest

    def share(self, what: What) -> tuple[bool, What]:
        """What is accepted from now on is a part of ``what``; comes back what ``leave`` is to restore."""
        before = self.shared, self.whole
        self.shared, self.whole = True, what or self.whole
        return before

    def leave(self, before: tuple[bool, What]) -> None:
        """The block that shares the place ends."""
        self.shared, self.whole = before

    def named(self, what: What) -> What:
        """What a call is, together with the one that it is a part of."""
        return (self.whole, what) if self.shared else what

    def have_come_to(self, place: int, stands: int) -> bool:
        """Whether all places below that one have been given out, and as many parts of it as stand."""
        return (self.latest, self.part) >= ((place, stands) if stands else (place - 1, 0))

    def next_round(self) -> int:
        """Go on at the next round number."""
        self.latest += ROUND - self.latest % ROUND
        return self.latest

    def next_child(self) -> int:
        """What is called from now on is another child task's; the place of what the last one left out."""
        child = self.latest // CHILD
        self.ends[child] = self.latest
        self.ends.pop(child - _ENDS, None)
        missed, self.latest = self.latest + 1, (child + 1) * CHILD
        self.part = 0
        return missed

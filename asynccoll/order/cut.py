"""What a refused call does to a lane, on one rank. ``lane`` changes it, ``refusals`` tells the peers.

A *place* is the number of a call on its lane: every call of the user's takes one on every rank, made or
refused. A call of several operations (a tree, a ``coalescing`` block) has *parts* at its place, which all
ranks send in the same order; who refuses it says how many of them it had sent, and those stand. An *epoch* is
a run of places for which all ranks make the same native calls in the same order. It ends with a refusal, in
three steps, and this is what holds in each:

1. *Halted* at place P, since this rank refused P, or heard that a peer did. Nothing at or above P is issued
   from now on: calls that are accepted there are held. P can only fall, when a lower refusal is heard of.
   What is below P goes on as ever, for every rank makes those calls, and so do the parts of P that stand.
   What else was issued at or above P has lost its peers, and fails at once.
2. *Stated*: everything below P has been accepted, issued and is over. This rank says once, for this epoch,
   how far it went: the highest place that it issued (``issued``), that or its own refused place
   (``reached``), and the refusal. It does nothing more on this lane until all ranks have said the same.
3. *Settled*: from the same statements every rank works out the same verdict. The epoch ended at the lowest
   refused place; the next one begins above the highest place that anybody reached. Calls between fail on
   every rank (unless they were over), those that a user has yet to make, too. What was held above goes on,
   up to the next refusal in it. The communicator is kept if nobody issued anything at or above the cut;
   else some ranks are ahead of others on it, and every rank opens another.

So in every epoch all ranks begin at the same place, on communicators that are in step, and a result is given
only if every rank made that call in that epoch. Each step is one change under the lane's lock, made before
anybody is woken; so a waiter that is told of a refusal finds the lane halted. Messages have no place,
and no part in this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerRefusedError
from asynccoll.host.call_number import numbered

if TYPE_CHECKING:
    from asynccoll.order.job import Job

__all__ = ["Cut", "Refusal", "Statement", "Verdict"]


_MISMATCH = f"{CollectiveMismatchError.__name__}: "


@dataclass(frozen=True, slots=True)
class Refusal:
    """``rank`` does not make the call at ``place``."""

    rank: int
    place: int
    why: str
    #: so many parts of it were sent, as on every rank
    stands: int = 0

    @property
    def begins(self) -> tuple[int, int]:
        """The place, and the last part there, that is not lost."""
        return self.place, self.stands

    def loses(self, place: int, part: int) -> bool:
        """Whether that part of the call at ``place`` is lost."""
        return (place, part) > self.begins

    def error(self, lane: object, place: int) -> CollectiveError:
        """What becomes of the call at ``place``: this one, or one that was lost with it."""
        behind = f"call {numbered(place)} on {lane} was in flight behind {numbered(self.place)}"
        if self.why.startswith(_MISMATCH):  # who found it need not be the one that differs
            differ = self.why.removeprefix(_MISMATCH)
            if place == self.place:
                return CollectiveMismatchError(differ)
            return PeerRefusedError(f"{behind}, about which {differ}\nissue it again")
        if place == self.place:
            return PeerRefusedError(
                f"rank {self.rank} refused its side of call {numbered(place)} on {lane}: {self.why}",
                (self.rank,),
            )
        return PeerRefusedError(
            f"{behind}, which rank {self.rank} refused ({self.why}); issue it again",
            (self.rank,),
        )


@dataclass(frozen=True, slots=True)
class Statement:
    """How far a rank went in an epoch, and what it refused there, if it did."""

    issued: int
    reached: int
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks work out from all statements."""

    refusal: Refusal
    resumes: int
    in_step: bool

    @classmethod
    def of(cls, statements: Sequence[Statement]) -> Verdict:
        """``statements``: those of all ranks, in their order; at least one has refused."""
        refusals = [one.refusal for one in statements if one.refusal is not None]
        first = min(refusals, key=lambda refusal: (refusal.begins, refusal.rank))
        return cls(
            first,
            max(one.reached for one in statements) + 1,
            all(one.issued < first.place for one in statements),
        )

    def covers(self, place: int) -> bool:
        """Whether the call at ``place`` was lost, or what was left of it."""
        return self.refusal.place <= place < self.resumes


class Cut:
    """The end of one epoch, as far as this rank has come with it. Changed with the lane's lock held."""

    __slots__ = ("epoch", "held", "issued", "mine", "peak", "reached", "refusal", "stated", "verdict")

    def __init__(self, epoch: int, refusal: Refusal, peak: int) -> None:
        self.epoch: int = epoch
        self.refusal: Refusal = refusal  # the lowest known
        self.peak: int = peak  # the highest place that may have been issued when the lane was halted
        self.mine: Refusal | None = None  # what this rank has refused in this epoch
        self.held: deque[Job | Refusal] = deque()  # accepted, or refused, above; in order
        self.stated: bool = False
        self.issued: int = 0  # once stated
        self.reached: int = 0  # likewise
        self.verdict: Verdict | None = None

    @property
    def place(self) -> int:
        """At and above which nothing is issued."""
        return self.refusal.place

    def state(self, issued: int) -> None:
        """All below is over, and this rank has issued nothing above ``issued``: this stands from now on."""
        self.issued = max(issued, self.place - 1)
        self.reached = max(self.issued, self.mine.place if self.mine is not None else 0)
        self.stated = True

    def claim(self, refusal: Refusal) -> None:
        """This rank's refusal in this epoch; one above it may belong to the next."""
        if self.mine is not None:
            self.hold(self.mine)
        self.mine = refusal

    def hold(self, *those: Job | Refusal) -> None:
        """Keep ``those`` back; they go on in the order of their places, whatever was held first."""
        self.held = deque(sorted((*self.held, *those), key=_order))


def _order(one: Job | Refusal) -> tuple[int, int, bool]:
    """Where it comes: a refusal after the parts that stand."""
    return (*one.begins, True) if isinstance(one, Refusal) else (one.place, one.part, False)

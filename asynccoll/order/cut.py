"""What a refused call does to a lane, on one rank. ``halting`` does it, ``refusals`` tells the peers.

The lane halts, all ranks agree on where it resumes, and it goes on there.

A *place* is a call's number in the order of its lane (``sequence`` of an ``Operation``, whose own ``place``
is the line that called it). Each collective call of the user takes one place on every rank, whether it is
made or refused. A call of several operations (a tree, a ``coalescing`` block) has *parts* at its place, which
all ranks issue in the same order. A rank that refuses such a call says how many parts it had issued before;
these remain valid. An *epoch* is a run of places for which all ranks make the same native calls in the same
order. A refusal ends it, in three steps:

1. *Halted* at place P: this rank has refused P, or has heard that a peer did. Nothing at or above P is issued
   from now on, except the parts of P that remain valid; calls accepted there are held. P can only fall, when
   a lower refusal is heard of. What is below P goes on as before, since every rank makes those calls.
   Whatever else had been issued at or above P has lost its peers, and fails at once.
2. *Stated*: everything below P, and the valid parts of P, have been accepted, issued and are over. This rank
   says once, for this epoch, how far it went: the highest place that it issued (``issued``), the higher of
   that and of the place that it refused itself (``reached``), and the refusal. It does nothing more on this
   lane until all ranks have said the same.
3. *Settled*: from the same statements every rank computes the same verdict. The epoch ended at the lowest
   refused place; the next one begins above the highest place that any rank reached. The calls between fail on
   every rank, unless they were over: also those that the user has yet to make. What was held above goes on,
   up to the next refusal among it. The communicator is kept if no rank issued anything at or above the
   refused place; otherwise some ranks may be ahead of others on it, and every rank opens another.

So in every epoch all ranks begin at the same place, on communicators that are in step, and a result is given
only if every rank made that call in that epoch. Where child tasks have a lane one after another, a refused
place of one says nothing of the calls of the next: what is accepted of these is held too, but what was issued
is not lost yet. A child that fails or is cancelled refuses all calls that it has not made, up to where the
next one begins; and a rank that opens a lane, all calls of such children before. If no rank has issued any of
these, the communicator is in step, and the calls behind them go on, numbered as before.

Each step is one change under the lane's lock, made before anybody is woken; so a waiter that is told of a
refusal finds the lane halted. Point-to-point messages have no place, and no part in this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerRefusedError
from asynccoll.host.call_number import CHILD, numbered

if TYPE_CHECKING:
    from asynccoll.order.job import Job
    from asynccoll.order.places import Places

__all__ = ["Cut", "Epochs", "Refusal", "Statement", "Verdict"]


#: A refusal is sent as text: by this the peers know that the calls differ, on whichever ranks.
_MISMATCH = f"{CollectiveMismatchError.__name__}: "


@dataclass(frozen=True, slots=True)
class Refusal:
    """``rank`` does not make the call at ``place``, nor those up to ``until``, if that is higher."""

    rank: int
    place: int
    why: str
    #: how many parts of it this rank had issued, which every rank does: they remain valid
    stands: int = 0
    until: int = 0

    @property
    def end(self) -> int:
        """Above what it refuses."""
        return max(self.until, self.place + 1)

    def refuses(self, place: int) -> bool:
        """Whether it is of the call at ``place``, which is lost whatever other ranks do."""
        return self.place <= place < self.end

    def above(self, place: int) -> Refusal:
        """What of it is left where all below ``place`` is lost in any case."""
        return self if self.place >= place else replace(self, place=place + (place % CHILD == 0), stands=0)

    @property
    def begins(self) -> tuple[int, int]:
        """What it loses begins behind this: the place, and the last part there that remains valid."""
        return self.place, self.stands

    def loses(self, place: int, part: int) -> bool:
        """Whether that part of the call at ``place`` is lost."""
        return (place, part) > self.begins

    def error(self, lane: object, place: int, operation: object = None) -> CollectiveError:
        """What the waiters of the call at ``place`` get: it is the refused one, or was lost with it.

        ``operation``: what has been made of it, whose text says which it is, and its line.
        """
        call = f"call {numbered(place)} on {lane}" if operation is None else str(operation)
        behind = f"{call} was in flight behind {numbered(self.place)}"
        if self.why.startswith(_MISMATCH):  # the rank that noticed need not be the one that differs
            differ = self.why.removeprefix(_MISMATCH)
            if self.refuses(place):
                return CollectiveMismatchError(differ)
            return PeerRefusedError(f"{behind}, about which {differ}\nissue it again")
        if self.refuses(place):
            return PeerRefusedError(
                f"rank {self.rank} refused its side of {call}: {self.why}",
                (self.rank,),
            )
        return PeerRefusedError(
            f"{behind}, which rank {self.rank} refused ({self.why}); issue it again",
            (self.rank,),
        )


@dataclass(frozen=True, slots=True)
class Statement:
    """A rank's vote on where an epoch ends: how far it went there, and what it refused, if anything."""

    issued: int
    reached: int
    refusal: Refusal | None
    #: the last place of child tasks that have ended on the lane, with the child's number
    ends: Sequence[tuple[int, int]] = ()

    def has_issued(self, first: int, end: int) -> bool:
        """Whether it has issued a call from ``first`` on and below ``end``; also if that is unknown."""
        latest, ends = self.issued // CHILD, dict(self.ends)
        for child in range(first // CHILD, min((end - 1) // CHILD, latest) + 1):
            last = self.issued if child == latest else ends.get(child, self.issued)
            if last >= max(first, child * CHILD + 1):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What every rank computes from the statements of all: a pure function of them, so it is the same."""

    refusal: Refusal
    resumes: int
    in_step: bool
    #: only calls of child tasks that have ended are lost, and those of the next are counted as they were
    next_child: bool = False
    #: what is refused beyond: the next epoch ends there, as all know who have read the statements
    beyond: tuple[Refusal, ...] = ()

    @classmethod
    def of(cls, statements: Sequence[Statement]) -> Verdict:
        """``statements``: those of all ranks, in their order; at least one has refused."""
        refusals = [one.refusal for one in statements if one.refusal is not None]
        first = min(refusals, key=lambda refusal: (refusal.begins, -refusal.end, refusal.rank))
        end, resumes = end_of(first), max(first.end, *(one.reached + 1 for one in statements))
        in_step = not any(one.has_issued(first.place, end) for one in statements)
        next_child = in_step and resumes >= end
        resumes = end if next_child else resumes
        beyond = tuple(refusal.above(resumes) for refusal in refusals if refusal.end > resumes)
        return cls(first, resumes, in_step, next_child, beyond)

    def covers(self, place: int) -> bool:
        """Whether the call at ``place`` was lost, or the parts of it that did not remain valid."""
        return self.refusal.place <= place < self.resumes

    def left_of(self, one: Job | Refusal) -> Job | Refusal | None:
        """What is left of what was held: what is made, or is refused, where all go on."""
        if isinstance(one, Refusal):
            return one.above(self.resumes) if one.end > self.resumes else None
        return one if one.place >= self.resumes else None


def end_of(refusal: Refusal) -> int:
    """Above all places of the child tasks whose calls it refuses, and below those of the next."""
    return -(-refusal.end // CHILD) * CHILD


class Cut:
    """The end of one epoch, as far as this rank has got. Changed with the lane's lock held."""

    __slots__ = ("ends", "epoch", "held", "issued", "mine", "peak", "reached", "refusal", "stated", "verdict")

    def __init__(self, epoch: int, refusal: Refusal, peak: int) -> None:
        self.epoch: int = epoch
        self.refusal: Refusal = refusal  # the lowest that is known here
        self.peak: int = peak  # the highest place that may have been issued when the lane was halted
        self.mine: Refusal | None = None  # what this rank will say that it refused in this epoch
        self.held: deque[Job | Refusal] = deque()  # accepted, or refused here, above it; by place
        self.stated: bool = False
        self.issued: int = 0  # as stated; 0 until then
        self.reached: int = 0  # likewise
        self.ends: list[tuple[int, int]] = []  # likewise: see ``Statement``
        self.verdict: Verdict | None = None

    @property
    def place(self) -> int:
        """At and above which nothing is issued, except the parts that remain valid."""
        return self.refusal.place

    def state(self, issued: int, ends: Mapping[int, int]) -> None:
        """Fix what this rank says: all below is over, and it has issued nothing above ``issued``.

        What is below the cut counts as issued, even where it was lost with an earlier epoch. ``ends``: the
        last places of child tasks that have ended.
        """
        self.issued = max(issued, self.place - 1)
        self.reached = max(self.issued, self.mine.place if self.mine is not None else 0)
        self.ends = list(ends.items())
        self.stated = True

    def claim(self, refusal: Refusal) -> None:
        """Have this be the refusal that this rank states.

        One that it made before is higher, and is held like a call: it may belong to the next epoch.
        """
        if self.mine is not None:
            self.hold(self.mine)
        self.mine = refusal

    def hold(self, *those: Job | Refusal) -> None:
        """Keep ``those`` until the verdict, in the order of their places, whichever came first."""
        self.held = deque(sorted((*self.held, *those), key=_order))


def _order(one: Job | Refusal) -> tuple[int, int, bool]:
    """Where it comes: a refusal after the parts that stand."""
    return (*one.begins, True) if isinstance(one, Refusal) else (one.place, one.part, False)


class Epochs:
    """Which epoch a lane is in, on one rank, and the cut that ends it. Used with the lane's lock held."""

    __slots__ = ("cut", "is_over", "issued", "number", "places", "settled")

    def __init__(self, places: Places) -> None:
        self.places: Places = places
        self.number: int = 0
        self.cut: Cut | None = None  # something is refused; None in the normal case
        self.settled: Verdict | None = None  # the latest
        #: the latest place that was queued and issued since, or whose call failed while it was being issued
        self.issued: int = 0
        self.is_over: bool = False  # there will be no more calls

    @property
    def unsettled(self) -> Cut | None:
        """The cut, until all ranks have said how far they went."""
        cut = self.cut
        return cut if cut is not None and cut.verdict is None else None

    @property
    def is_exhausted(self) -> bool:
        """Whether everything that is still made in this epoch has been accepted."""
        cut = self.unsettled
        return cut is not None and self.places.have_come_to(*cut.refusal.begins)

    @property
    def has_given_up(self) -> bool:
        """Whether what is left of the latest call is lost, as all ranks know."""
        return self.refusal_at(self.places.latest) is not None

    def refusal_at(self, place: int) -> Refusal | None:
        """The refusal with which that place was lost, as all ranks know."""
        settled = self.settled
        return settled.refusal if settled is not None and settled.covers(place) else None

    def has_lost(self, place: int, until: int) -> bool:
        """Whether all ranks know that the call at that place is lost, and those below ``until``."""
        settled = self.settled
        return settled is not None and settled.covers(place) and until <= settled.resumes

    def refusal_of(self, place: int, part: int) -> Refusal | None:
        """The refusal with which that part was lost, as far as is known."""
        cut = self.unsettled
        refusal = self.refusal_at(place) if cut is None else cut.refusal
        return refusal if refusal is not None and refusal.loses(place, part) else None

    def takes(self, job: Job) -> Refusal | bool:
        """Whether a call that is accepted now may be queued; the refusal if it is lost with one already.

        It is held, if neither, until there is a verdict.
        """
        if job.place and (given_up := self.refusal_at(job.place)) is not None:
            return given_up  # its peers have, already
        cut = self.cut
        if cut is None or not cut.refusal.loses(job.place, job.part):
            return True
        if cut.verdict is None:
            if cut.refusal.refuses(job.place):
                return cut.refusal
            cut.held.append(job)
            return False
        self.cut = None
        return True

    def halt(self, refusal: Refusal, peak: int, *, own: bool) -> Cut | None:
        """Something is refused, by this rank if it is its ``own``: the cut, if that makes it or lowers it."""
        cut, settled = self.unsettled, self.settled
        if settled is not None and refusal.place < settled.resumes:
            if refusal.end <= settled.resumes:
                return None
            refusal = refusal.above(settled.resumes)
        if cut is None:
            cut = self.cut = Cut(self.number, refusal, peak)
        elif refusal.begins >= cut.refusal.begins or cut.stated:
            if own and (cut.stated or refusal.end > cut.refusal.end):
                cut.hold(refusal)  # it may belong to the next epoch
            return None
        cut.refusal, cut.peak = refusal, peak
        if own:
            cut.claim(refusal)
        return cut

    def settle(self, cut: Cut, verdict: Verdict) -> list[Job]:
        """The next one begins, with what was held and is still wanted, up to the next refusal in that."""
        self.number += 1
        cut.verdict = self.settled = verdict
        if cut.mine is not None:
            cut.hold(cut.mine)  # it may be of a call of the next child task, which is still to be refused
        if self.places.latest >= verdict.resumes - 1:
            self.cut = None
        held = [one for one in map(verdict.left_of, cut.held) if one is not None]
        cut.held.clear()
        first = next((one for one in held if isinstance(one, Refusal)), None)
        following: Cut | None = None
        if first is not None:
            following = self.cut = Cut(self.number, first, first.place - 1)
            following.mine = first
        jobs: list[Job] = []
        for one in held:
            if not isinstance(one, Refusal) and (first is None or not first.loses(one.place, one.part)):
                jobs.append(one)
            elif following is not None and one is not first:
                following.hold(one)
        return jobs

    def end(self) -> list[Job]:
        """There are no more calls; comes back what was held."""
        self.is_over = True
        held = [] if self.cut is None else [one for one in self.cut.held if not isinstance(one, Refusal)]
        if self.cut is not None:
            self.cut.held.clear()
        return held

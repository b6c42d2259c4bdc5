"""What a refused call does to a lane: the lane halts, all ranks agree on where it resumes, and it resumes.

This module has the rules and the state of one rank; ``halting`` applies them to the lane, and
``health.refusals`` exchanges refusals and statements with the peers.

A *place* is a call's number in the order of its lane (``sequence`` of an ``Operation``; the ``place`` of an
``Operation`` is the source line that called it). Each collective call of the user takes one place on every
rank, whether it is made or refused. A call of several operations (a tree, a ``coalescing`` block) has *parts*
at its place, which all ranks issue in the same order. A rank that refuses such a call states how many parts
it had already issued; these remain valid. An *epoch* is a run of places for which all ranks make the same
native calls in the same order. A refusal ends the epoch, by a *cut* at the refused place, in three steps:

1. *Halted* at place P: this rank has refused P, or has learned that a peer did. From now on, nothing at or
   above P is issued except the parts of P that remain valid; calls accepted there are held. P changes only to
   a lower place, if this rank learns of a lower refusal. Calls below P proceed as before, since every rank
   makes them. Any other operation already issued at or above P may never be matched by the peers, and fails.
   If native code may still write to its memory, its waiters get the error only once that has ended: when the
   connections are left (*Settled*), or after a second.
2. *Stated*: all calls below P and the valid parts of P have been accepted and issued, and are over. This rank
   states once for this epoch how far it went: the highest place that it issued (``issued``), the higher of
   that and the place that it refused itself (``reached``), and its own refusal, if it made one. It does
   nothing more on this lane until all ranks have made their statements.
3. *Settled*: from the same statements every rank computes the same verdict. The epoch ended at the lowest
   refused place; the next one begins above the highest place that any rank reached. The calls in between fail
   on every rank unless they were over, including calls that the user has yet to make. The held calls above
   proceed, up to the next refusal among them. The communicator is kept if no rank issued anything at or above
   the refused place; otherwise some ranks may be ahead of others on it, and every rank opens another.

So in every epoch all ranks begin at the same place, on communicators that are in step, and a call returns a
result only if every rank made that call in that epoch.

If several child tasks use a lane one after another, a refused place of one child says nothing about the calls
of the next child: calls of that child accepted from now on are held too, but those already issued are not
lost yet. A child that fails or is cancelled refuses all calls that it has not made, up to the place where the
next child begins; a rank that opens a lane refuses the calls of all such children that ended before. If no
rank has issued any of these calls, the communicator is in step, and later calls keep their numbers.

Each step is one change under the lane's lock, made before any waiter is woken, so a waiter that gets the
error of a refusal finds the lane halted. Point-to-point messages have no place, and no refusal affects them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerRefusedError
from asynccoll.host.call_number import CHILD, numbered
from asynccoll.order.job import Job
from asynccoll.order.places import Places

#: A refusal's reason is sent as text. A reason with this prefix says that ranks made different calls.
_MISMATCH = f"{CollectiveMismatchError.__name__}: "


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rank's refusal to make the calls from ``place`` to below ``until``, at least the one at ``place``."""

    rank: int
    place: int
    why: str
    #: how many parts of that call ``rank`` had issued; every rank issues these, and they remain valid
    stands: int = 0
    until: int = 0

    @property
    def end(self) -> int:
        """The first place above the refused ones."""
        return max(self.until, self.place + 1)

    def refuses(self, place: int) -> bool:
        """Whether the call at ``place`` is itself refused, and so lost regardless of what others issued."""
        return self.place <= place < self.end

    def above(self, place: int) -> Refusal:
        """Return the refusal of the remaining calls, given that all calls below ``place`` are lost anyway."""
        return self if self.place >= place else replace(self, place=place + (place % CHILD == 0), stands=0)

    @property
    def begins(self) -> tuple[int, int]:
        """The last (place, part) that remains valid; everything above it is lost."""
        return self.place, self.stands

    def loses(self, place: int, part: int) -> bool:
        """Whether that part of the call at ``place`` is lost."""
        return (place, part) > self.begins

    def error(self, lane: object, place: int, operation: object = None) -> CollectiveError:
        """Return the error for waiters of the call at ``place``, which was refused or lost behind a refusal.

        ``operation``: that call's operation, if it has one; its text names the call and its source line.
        """
        call = f"call {numbered(place)} on {lane}" if operation is None else str(operation)
        behind = f"{call} was in flight behind {numbered(self.place)}"
        if self.why.startswith(_MISMATCH):  # the rank that noticed need not be the one that differs
            differ = self.why.removeprefix(_MISMATCH)
            if self.refuses(place):
                return CollectiveMismatchError(differ)
            return PeerRefusedError(f"{behind}, which failed: {differ}\nissue it again")
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
    """A rank's statement as an epoch ends: how far it went (*Stated* above), and its refusal or None."""

    issued: int
    reached: int
    refusal: Refusal | None
    #: for each of the latest child tasks that have ended on the lane: its number, and its last place
    ends: Sequence[tuple[int, int]] = ()

    def has_issued(self, first: int, end: int) -> bool:
        """Whether the rank has issued a call from ``first`` to below ``end``; True if that is unknown."""
        latest, ends = self.issued // CHILD, dict(self.ends)
        for child in range(first // CHILD, min((end - 1) // CHILD, latest) + 1):
            last = self.issued if child == latest else ends.get(child, self.issued)
            if last >= max(first, child * CHILD + 1):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where an epoch ends and the next begins: a pure function of all statements, so the same on all ranks.

    ``refusal`` is the lowest refusal, ``resumes`` the first place of the next epoch. ``in_step``: no rank had
    issued any of the lost calls, so the communicator is kept.
    """

    refusal: Refusal
    resumes: int
    in_step: bool
    #: only calls of child tasks that have ended are lost; the calls of the next child keep their numbers
    next_child: bool = False
    #: stated refusals of calls from ``resumes`` on: these will end the next epoch
    beyond: tuple[Refusal, ...] = ()

    @classmethod
    def of(cls, statements: Sequence[Statement]) -> Verdict:
        """Compute the verdict of all ranks' statements, in rank order; at least one has a refusal."""
        refusals = [one.refusal for one in statements if one.refusal is not None]
        first = min(refusals, key=lambda refusal: (refusal.begins, -refusal.end, refusal.rank))
        end, resumes = end_of(first), max(first.end, *(one.reached + 1 for one in statements))
        in_step = not any(one.has_issued(first.place, end) for one in statements)
        next_child = in_step and resumes >= end
        resumes = end if next_child else resumes
        beyond = tuple(refusal.above(resumes) for refusal in refusals if refusal.end > resumes)
        return cls(first, resumes, in_step, next_child, beyond)

    def covers(self, place: int) -> bool:
        """Whether the call at ``place`` was lost, or at least its parts that did not remain valid."""
        return self.refusal.place <= place < self.resumes

    def left_of(self, one: Job | Refusal) -> Job | Refusal | None:
        """Return what remains in the next epoch of a held call or refusal; None if it is lost or settled."""
        if isinstance(one, Refusal):
            return one.above(self.resumes) if one.end > self.resumes else None
        return one if one.place >= self.resumes else None


def end_of(refusal: Refusal) -> int:
    """Return a bound above all places of the child tasks whose calls are refused, below the next child's."""
    return -(-refusal.end // CHILD) * CHILD


class Cut:
    """The end of one epoch, as far as this rank has got with it. Changed with the lane's lock held."""

    __slots__ = ("ends", "epoch", "held", "issued", "mine", "peak", "reached", "refusal", "stated", "verdict")

    def __init__(self, epoch: int, refusal: Refusal, peak: int) -> None:
        self.epoch: int = epoch
        self.refusal: Refusal = refusal  # the lowest one known here, which may still change (``Epochs.halt``)
        self.peak: int = peak  # the highest place that may have been issued when the lane was halted
        self.mine: Refusal | None = None  # the refusal that this rank will put into its statement
        self.held: deque[Job | Refusal] = deque()  # calls accepted or refused here above the cut, by place
        self.stated: bool = False
        self.issued: int = 0  # as stated; 0 until then
        self.reached: int = 0  # as stated
        self.ends: list[tuple[int, int]] = []  # as stated: see ``Statement``
        self.verdict: Verdict | None = None

    @property
    def place(self) -> int:
        """The refused place: nothing is issued at or above it, except the parts that remain valid."""
        return self.refusal.place

    def state(self, issued: int, ends: Mapping[int, int]) -> None:
        """Fix this rank's statement: all calls below the cut are over, and none above ``issued`` was issued.

        Calls below the cut count as issued, even those lost in an earlier epoch. ``ends``: the last place of
        each child task that has ended, by its number.
        """
        self.issued = max(issued, self.place - 1)
        self.reached = max(self.issued, self.mine.place if self.mine is not None else 0)
        self.ends = list(ends.items())
        self.stated = True

    def claim(self, refusal: Refusal) -> None:
        """Make ``refusal`` the one that this rank states.

        If this rank has refused before in this epoch, that refusal is at a higher place. It is held like a
        call, since it may belong to the next epoch.
        """
        if self.mine is not None:
            self.hold(self.mine)
        self.mine = refusal

    def hold(self, *those: Job | Refusal) -> None:
        """Keep ``those`` until the verdict, sorted by place."""
        self.held = deque(sorted((*self.held, *those), key=_order))


def _order(one: Job | Refusal) -> tuple[int, int, bool]:
    """Sort key by place and part; a refusal sorts after the parts that remain valid."""
    return (*one.begins, True) if isinstance(one, Refusal) else (one.place, one.part, False)


class Epochs:
    """Which epoch a lane is in, on one rank, and the cut that ends it.

    Changed with the lane's lock held. ``cut``, ``unsettled``, ``is_over`` and ``refusal_of`` may be read
    without it, but may then be out of date.
    """

    __slots__ = ("_made", "cut", "is_over", "issued", "number", "places", "settled")

    def __init__(self, places: Places) -> None:
        self.places: Places = places
        self.number: int = 0
        self.cut: Cut | None = None  # None in the normal case: nothing is refused
        self.settled: Verdict | None = None  # the latest verdict
        #: the latest place that was issued from the queue, or whose call failed while it was being issued
        self.issued: int = 0
        self.is_over: bool = False  # the lane accepts no more calls
        self._made: int = 0  # once it is over: see ``announced``

    @property
    def unsettled(self) -> Cut | None:
        """The cut, as long as it has no verdict; else None."""
        cut = self.cut
        return cut if cut is not None and cut.verdict is None else None

    @property
    def announced(self) -> int:
        """The place up to which peers know about this rank's calls, made or refused.

        Peers are told of a refusal that is held for the next epoch when that epoch begins; never if this rank
        leaves before.
        """
        if self.is_over:
            return self._made
        cut = self.unsettled
        held = () if cut is None else (one.place - 1 for one in cut.held if isinstance(one, Refusal))
        return min(held, default=self.places.latest)

    @property
    def is_exhausted(self) -> bool:
        """Whether there is an unsettled cut, and all calls that it leaves valid have been accepted."""
        cut = self.unsettled
        return cut is not None and self.places.have_come_to(*cut.refusal.begins)

    @property
    def has_given_up(self) -> bool:
        """Whether the rest of the latest call is lost, by a verdict that all ranks share."""
        return self.refusal_at(self.places.latest) is not None

    def refusal_at(self, place: int) -> Refusal | None:
        """Return the refusal that lost ``place`` by the latest verdict, which all ranks share; else None."""
        settled = self.settled
        return settled.refusal if settled is not None and settled.covers(place) else None

    def has_lost(self, place: int, until: int) -> bool:
        """Whether the latest verdict says that the calls from ``place`` to below ``until`` are lost."""
        settled = self.settled
        return settled is not None and settled.covers(place) and until <= settled.resumes

    def refusal_of(self, place: int, part: int) -> Refusal | None:
        """Return the refusal that lost this part, settled or not, as far as this rank knows; else None."""
        cut = self.unsettled
        refusal = self.refusal_at(place) if cut is None else cut.refusal
        return refusal if refusal is not None and refusal.loses(place, part) else None

    def takes(self, job: Job) -> Refusal | bool:
        """Decide what happens to a call that is accepted now.

        Returns True if the call may be queued, and the refusal if it is already lost. Otherwise the cut holds
        the call until there is a verdict, and False is returned.
        """
        if job.place and (given_up := self.refusal_at(job.place)) is not None:
            return given_up  # by a verdict that the peers have as well
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
        """Apply ``refusal``, this rank's own if ``own``. Returns the cut if it is new or was lowered."""
        cut, settled = self.unsettled, self.settled
        if settled is not None and refusal.place < settled.resumes:
            if refusal.end <= settled.resumes:
                return None
            refusal = refusal.above(settled.resumes)
        if cut is None:
            cut = self.cut = Cut(self.number, refusal, peak)
        elif refusal.begins >= cut.refusal.begins or cut.stated:
            if own and (cut.stated or refusal.end > cut.refusal.end):
                cut.hold(refusal)  # the refused calls may belong to the next epoch
            return None
        cut.refusal, cut.peak = refusal, peak
        if own:
            cut.claim(refusal)
        return cut

    def settle(self, cut: Cut, verdict: Verdict) -> list[Job]:
        """Begin the next epoch. Returns the held calls that may be queued now.

        These are the calls that the verdict has not lost, below the first refusal that was held with them.
        That refusal, if any, begins the next cut, which holds the remaining calls.
        """
        self.number += 1
        cut.verdict = self.settled = verdict
        if cut.mine is not None:
            cut.hold(cut.mine)  # it may refuse a call of the next child task, in the next epoch
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

    def end(self, queued: Sequence[Job] = (), *, blamed: bool = False) -> list[Job]:
        """Stop accepting calls. Returns the calls that were held.

        Like those ``queued``, they are never issued. Peers that wait for them name this rank once it has
        left, unless another rank is ``blamed`` for the end: then they count as made.
        """
        held = [] if self.cut is None else [one for one in self.cut.held if not isinstance(one, Refusal)]
        unmade = () if blamed else (one.place - 1 for one in (*queued, *held) if one.place)
        self._made = min(self.announced, *unmade, self.places.latest)
        self.is_over = True
        if self.cut is not None:
            self.cut.held.clear()
        return held

"""What this rank does about refused calls of a lane, its own and its peers'. See ``cut`` for what holds.

``health.refusals`` says when: it talks with the peers. Each step is one change under the lane's lock, made
before anybody is woken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asynccoll.order.cut import Cut, Epochs, Refusal, Verdict, end_of

if TYPE_CHECKING:
    from asynccoll import host
    from asynccoll.errors import CollectiveError
    from asynccoll.order.operation import Operation, Order
    from asynccoll.order.outstanding import Outstanding
    from asynccoll.order.queue import Queue
    from asynccoll.order.records import Records
    from asynccoll.transport.completion import Completion

__all__ = ["Halting"]

#: An operation that will never end, and what to tell of it.
Lost = tuple["Operation", "CollectiveError"]


class Halting:
    """Of one lane. It takes the lane's lock itself: what is not private is called without it."""

    def __init__(
        self,
        lane: Order,
        lock: host.Lock,
        epochs: Epochs,
        queue: Queue,
        outstanding: Outstanding,
        records: Records,
        restart: Callable[[bool], Callable[[], object] | None],
    ) -> None:
        """``restart``: begins the next epoch, on another communicator unless ranks are in step.

        It is called with the lock held; what it gives back is left to do without it.
        """
        self.lock: host.Lock = lock
        self._lane = lane
        self._rank: int = lane.world.rank
        self._epochs = epochs
        self._queue = queue
        self._outstanding = outstanding
        self._records = records
        self._restart = restart

    @property
    def is_halted(self) -> bool:
        """Whether a refused call is being settled."""
        return self._epochs.cut is not None

    @property
    def own(self) -> tuple[int, Refusal] | None:
        """The epoch, and what this rank has refused in it that is not settled."""
        with self.lock:
            cut = self._epochs.unsettled
            return None if cut is None or cut.mine is None else (cut.epoch, cut.mine)

    @property
    def is_settling(self) -> bool:
        """Whether peers may still ask this rank which of its calls a refusal cancels.

        Not while it has calls to make below the refused one: until then it cannot answer.
        """
        cut = self._epochs.unsettled
        if cut is None or self._epochs.is_over:
            return False
        return cut.stated or self._epochs.is_exhausted

    def refuse(
        self,
        why: str,
        place: int | None,
        spare: Completion | None = None,
        part: int | None = None,
        name: str = "",
        until: int = 0,
    ) -> Cut | None:
        """This rank does not make the call at ``place`` (None: its next one). The cut, if this begins one.

        Nor what is left of it from ``part`` on; None: after what was accepted last. Whoever waits for
        ``spare`` is told otherwise. ``name``: of the call, if it was made just now and is not recorded yet.
        ``until``: nor does it make those below that place.
        """
        epochs = self._epochs
        places = epochs.places
        with self.lock:
            if epochs.is_over or (place is not None and epochs.has_lost(place, until)):
                return None
            peak = self._peak()
            if place is None:
                place = places.open()
            accepted = places.part if place == places.latest else 0
            stands = accepted if part is None else part - 1
            if name:
                self._records.refused(name, place, stands + 1, -1, why)
            begun, lost = self._halt(Refusal(self._rank, place, why, stands, until), peak)
        self._fail_all([one for one in lost if one[0].completion is not spare])
        return begun

    def hear(self, epoch: int, refusal: Refusal) -> Cut | None:
        """A peer has refused a call in ``epoch``. The cut, if this begins one."""
        epochs = self._epochs
        with self.lock:
            if epochs.is_over or epoch != epochs.number or (epochs.cut and epochs.cut.verdict):
                return None
            begun, lost = self._halt(refusal, self._peak())
            if refusal.until:  # lost in any case, also where that rank has yet to open the lane
                lost += self._lost(refusal.place, refusal.until, refusal)
        self._fail_all(lost)
        return begun

    def conclude(self, cut: Cut) -> bool:
        """Whether all below the cut is over here: then this rank can say how far it went, and that stands."""
        with self.lock:
            if not cut.stated and self._epochs.cut is cut and self._is_quiet(cut.refusal):
                cut.state(self._peak(), self._epochs.places.ends)
            return cut.stated

    def resume(self, cut: Cut, verdict: Verdict) -> Cut | None:
        """All ranks have stated how far they went: go on where all do. The next cut, if one is waiting."""
        with self.lock:
            if self._epochs.is_over or self._epochs.cut is not cut:
                return None
            lost = self._lost(verdict.refusal.place, verdict.resumes - 1, verdict.refusal)
            self._queue.give_up(verdict.refusal, verdict.resumes - 1)
            jobs = self._epochs.settle(cut, verdict)
            rest = None if verdict.next_child else self._restart(verdict.in_step)
            self._queue.extend(jobs)
            for refusal in verdict.beyond:
                if refusal.rank != self._rank:  # else it was held
                    lost += self._halt(refusal, max(cut.issued, refusal.place - 1))[1]
            following = self._epochs.unsettled
        self._queue.request(len(jobs))
        self._fail_all(lost)
        if rest is not None:
            rest()
        return following

    # With the lock held

    def _peak(self) -> int:
        """The highest place of which something may have been issued."""
        epochs, cut = self._epochs, self._epochs.unsettled
        return max(self._queue.reached(epochs.places.latest) if cut is None else cut.peak, epochs.issued)

    def _halt(self, refusal: Refusal, peak: int) -> tuple[Cut | None, list[Lost]]:
        """Issue nothing at or above the refused place; what is in flight there is lost."""
        before = self._epochs.cut
        cut = self._epochs.halt(refusal, peak, own=refusal.rank == self._rank)
        if cut is None:
            return None, []
        refusal = cut.refusal
        end = end_of(refusal)
        cut.hold(*self._queue.take_out(refusal, end))
        last = max(refusal.end - 1, min(peak, end))
        return None if cut is before else cut, self._lost(refusal.place, last, refusal)

    def _lost(self, first: int, last: int, refusal: Refusal) -> list[Lost]:
        """What is in flight from ``first`` to ``last``, with the error of each."""
        return [
            (operation, refusal.error(self._lane, operation.sequence, operation))
            for operation in self._outstanding
            if first <= operation.sequence <= last and refusal.loses(operation.sequence, operation.part)
        ]

    def _is_quiet(self, refusal: Refusal) -> bool:
        places = self._epochs.places
        return (
            places.have_come_to(*refusal.begins)
            and not places.shared
            and self._queue.is_quiet_below(refusal)
            and all(
                one.landed()
                for one in self._outstanding.collectives
                if not refusal.loses(one.sequence, one.part)
            )
        )

    # Without it

    def _fail_all(self, lost: list[Lost]) -> None:
        for operation, error in lost:
            operation.fail(error)
        self._queue.drive()

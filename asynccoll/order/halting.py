"""Halt and resume one lane when this rank or a peer refuses a call.

``cut`` defines the terms (place, part, epoch, cut, statement, verdict) and the rules. ``health.refusals``
communicates with the peers and calls the methods here. Each method makes one change under the lane's lock,
and wakes waiters only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asynccoll import host
from asynccoll.errors import CollectiveError
from asynccoll.order.cut import Cut, Epochs, Refusal, Verdict, end_of
from asynccoll.order.operation import Operation, Order
from asynccoll.order.outstanding import Outstanding
from asynccoll.order.queue import Queue
from asynccoll.order.records import Records
from asynccoll.transport.completion import Completion

#: In a record: the call is not a message.
_NO_PEER = -1
#: An operation that will never complete, and the error that its waiters get.
Lost = tuple["Operation", "CollectiveError"]


class Halting:
    """The effect of refusals on one lane.

    Public methods, ``own`` and ``announced`` take the lane's lock: call them without holding it. The others
    take no lock: ``is_halted`` and ``is_settling`` are for callers that look again if they were outdated.
    """

    def __init__(
        self,
        lane: Order,
        lock: host.Lock,
        epochs: Epochs,
        queue: Queue,
        outstanding: Outstanding,
        records: Records,
        restart: Callable[[bool], Callable[[], bool] | None],
    ) -> None:
        """``restart(in_step)`` begins the next epoch, and opens another communicator unless ``in_step``.

        It is called with the lock held, and returns a function to be called after the release, or None. That
        returns whether the operations in flight on the old communicator will end.
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
        """Whether the lane has a cut: it is being settled, or this rank has yet to make some lost calls."""
        return self._epochs.cut is not None

    @property
    def own(self) -> tuple[int, Refusal] | None:
        """The epoch and this rank's own refusal in it, until the refusal is settled; else None."""
        with self.lock:
            cut = self._epochs.unsettled
            return None if cut is None or cut.mine is None else (cut.epoch, cut.mine)

    @property
    def announced(self) -> int:
        """The place up to which peers know about this rank's calls, made or refused."""
        with self.lock:
            return self._epochs.announced

    @property
    def is_settling(self) -> bool:
        """Whether a refusal is being settled that needs no further calls from the program on this rank.

        False while calls below the refused one have yet to be made: until then this rank cannot state how far
        it went.
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
        count: int = 1,
    ) -> Cut | None:
        """Refuse the call at ``place`` (None: this rank's next ``count``), and halt the lane there.

        Returns the cut if this refusal begins it; None if everything that it refuses was already lost, if it
        only moved an existing cut, or if the lane is closed. ``part`` is the first refused part of the call;
        None: the part after the last one accepted if the call is the latest one, else all parts. The
        operation with the completion ``spare`` is not failed here: the caller gives its waiter a separate
        error. ``name`` is the call's name, if it was made just now and is not recorded yet. ``until``, if not
        0: all calls in [``place``, ``until``) are refused, as this rank will never make them.
        """
        epochs = self._epochs
        places = epochs.places
        with self.lock:
            if epochs.is_over or (place is not None and epochs.has_lost(place, until)):
                return None
            peak = self._peak()  # before a place is opened here, at which nothing is issued
            if place is None:
                place = places.open(count)
                until = place + count if count > 1 else 0
            accepted = places.part if place == places.latest else 0
            stands = accepted if part is None else part - 1
            if name:
                self._records.refused(name, place, stands + 1, _NO_PEER, why)
            begun, lost = self._halt(Refusal(self._rank, place, why, stands, until), peak)
        self._fail_all([one for one in lost if one[0].completion is not spare])
        return begun

    def hear(self, epoch: int, refusal: Refusal) -> Cut | None:
        """Halt the lane where a peer has refused a call in ``epoch``.

        Returns the cut if this refusal begins it, else None.
        """
        epochs = self._epochs
        with self.lock:
            if epochs.is_over or epoch != epochs.number or (epochs.cut and epochs.cut.verdict):
                return None
            begun, lost = self._halt(refusal, self._peak())
            if refusal.until:  # even if there is a lower cut: that rank never makes these calls
                lost += self._lost(refusal.place, refusal.end - 1, refusal)
        self._fail_all(lost)
        return begun

    def conclude(self, cut: Cut) -> bool:
        """Fix this rank's statement once all calls that the cut leaves valid are over.

        Returns whether the statement is fixed.
        """
        with self.lock:
            if not cut.stated and self._epochs.cut is cut and self._is_quiet(cut.refusal):
                cut.state(self._peak(), self._epochs.places.ends)
            return cut.stated

    def resume(self, cut: Cut, verdict: Verdict) -> Cut | None:
        """Begin the next epoch at the place in ``verdict``, now that all ranks have made their statements.

        Returns the cut of the next epoch if a call in it is known to be refused already, else None.
        """
        with self.lock:
            if self._epochs.is_over or self._epochs.cut is not cut:
                return None
            lost = self._lost(verdict.refusal.place, verdict.resumes - 1, verdict.refusal)
            self._queue.give_up(verdict.refusal, verdict.resumes - 1)
            jobs = self._epochs.settle(cut, verdict)
            rest = None if verdict.next_child else self._restart(verdict.in_step)
            self._queue.extend(jobs)
            for refusal in verdict.beyond:
                if refusal.rank != self._rank:  # ``settle`` has applied this rank's own, which the cut held
                    lost += self._halt(refusal, max(cut.issued, refusal.place - 1))[1]
            following = self._epochs.unsettled
        self._queue.request(len(jobs))
        self._fail_all(lost)
        if rest is not None and not rest():
            host.call_each(one.tell for one, _ in lost)
        return following

    def tell(self, *, late: bool) -> bool:
        """End the waits for lost operations to whose memory nothing writes any more; all if it is ``late``.

        Returns whether others are left.
        """
        with self.lock:
            known = list(self._outstanding)
        lost = [one for one in known if one.failure is not None and not one.done()]
        due = [one for one in lost if late or not one.completion.writing()]
        host.call_each(one.tell for one in due)
        return len(due) < len(lost)

    # Called with the lock held

    def _peak(self) -> int:
        """Return the highest place at which an operation may have been issued."""
        epochs, cut = self._epochs, self._epochs.unsettled
        return max(self._queue.reached(epochs.places.latest) if cut is None else cut.peak, epochs.issued)

    def _halt(self, refusal: Refusal, peak: int) -> tuple[Cut | None, list[Lost]]:
        """Begin a cut at ``refusal``, or lower the existing one; hold the queued calls that it loses.

        Returns the cut if it is new, and the operations that it loses: those explicitly refused, and those of
        the same child task that may have been issued behind them.
        """
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
        """Return the operations from ``first`` to ``last`` that ``refusal`` loses, each with its error."""
        return [
            (operation, refusal.error(self._lane, operation.sequence, operation))
            for operation in self._outstanding
            if first <= operation.sequence <= last and refusal.loses(operation.sequence, operation.part)
        ]

    def _is_quiet(self, refusal: Refusal) -> bool:
        """Whether all calls that ``refusal`` leaves valid were accepted and issued, and are over here."""
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

    # Called without the lock

    def _fail_all(self, lost: list[Lost]) -> None:
        """Have the lost operations fail, then issue what the queue may issue now."""
        host.call_each([*(partial(one.lose, error) for one, error in lost), self._queue.drive])

"""When a call of a lane fails: which error its waiter gets, whether peers are told, whether the lane is lost.

This module must not know how refusals are settled (``cut``) or how a culprit is found (``needs.World``).
"""

from __future__ import annotations

from asynccoll.errors import (
    AsyncCollError,
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
    PeerRefusedError,
    collective_error,
)
from asynccoll.host.endings import in_full
from asynccoll.order.cut import Epochs
from asynccoll.order.job import Job
from asynccoll.order.operation import Operation, Order
from asynccoll.transport.completion import Completion


class Failing:
    """The failures of one lane. ``not_taken`` is called with the lane's lock held, the others without it."""

    def __init__(self, lane: Order, epochs: Epochs) -> None:
        self._lane = lane
        self._epochs = epochs
        #: nothing more is issued: a program broke off or a message was not sent, so peers may be out of step
        self.out_of_step: bool = False

    def not_taken(self, error: BaseException, name: str, *, message: bool) -> None:
        """Handle an ``error`` that a backend raised instead of accepting a call.

        Raises a typed error if ``error`` is a ``RuntimeError`` but not one of our types; otherwise the caller
        raises ``error`` itself.
        """
        if message:
            self.lose_messages(error)
        else:
            _, self._epochs.issued, *_ = self._epochs.places.next(name)
        if isinstance(error, RuntimeError) and not isinstance(error, AsyncCollError):
            raise collective_error(error, f"{name} on {self._lane}") from error

    def broke_off(self, job: Job, error: BaseException) -> None:
        """Handle a program that failed halfway: peers may wait for its remaining calls, or be ahead of it.

        Refuse the call, or lose the lane if one of its native calls failed. Errors that every rank raises (a
        mismatch that all have found) need neither.
        """
        if not job.place:
            self.lose_messages(error)
            return
        lane = self._lane
        alone = isinstance(error, CollectiveMismatchError) and error.alone
        if isinstance(error, CollectiveError) and not alone:
            # Other ranks may have issued fewer parts of this call: the remaining parts are lost.
            if job.shares and isinstance(error, CollectiveMismatchError):
                lane.world.refuse(lane, error, job.place, spare=job.promise, part=job.part)
            return
        failure = collective_error(error, str(lane))
        if job.step is not None and job.step.done() and job.step.error() is not None:
            self._lose_soon(failure)
        elif not isinstance(failure, PeerLostError):
            lane.world.refuse(lane, error, job.place, spare=job.promise, part=job.part)

    def differs(self, found: CollectiveMismatchError, place: int, part: int, spare: Completion) -> None:
        """Refuse the call at that place and part, or the earlier one where ranks began to differ."""
        place, part = min(found.begins or (place, part), (place, part))
        told = self._lane.world.diagnose(self._lane, found)
        self._lane.world.refuse(self._lane, told, place, spare=spare, part=part)

    def lose_messages(self, error: BaseException) -> None:
        """Lose the lane because a message was not accepted: the peer would take the next one for it."""
        if not isinstance(error, AsyncCollError):  # one of ours, as for a bad tag: nothing was sent
            self._lose_soon(collective_error(error, f"a message on {self._lane}"))

    def _lose_soon(self, failure: CollectiveError) -> None:
        """Stop issuing immediately; the lane is lost once another thread has found the culprit."""
        self.out_of_step = True
        self._lane.world.find_out(self._lane, failure)

    def explain(self, operation: Operation, native: BaseException) -> AsyncCollError:
        """Return the typed error for ``native``; the world finds out which rank is the culprit.

        If the culprit is a lost rank of the group, the lane is lost as well.
        """
        lane = self._lane
        if isinstance(native, AsyncCollError) and not isinstance(native, CollectiveError):
            return native  # raised on this rank, by the call itself
        refusal = self._epochs.refusal_of(operation.sequence, operation.part)
        if refusal is not None and native is not lane.broken:
            own = refusal.rank == lane.world.rank and refusal.place == operation.sequence
            if not (own and refusal.why == in_full(native)):
                # The native error is only a consequence: the peers have closed the communicator.
                return refusal.error(lane, operation.sequence, operation)
        if lane.broken is not None and not isinstance(native, CollectiveError):
            return lane.broken.for_waiter()  # the communicator was given up with that error
        error = collective_error(native, str(operation))
        # A backend does not know the call, the user's source line, or the ranks of the world.
        if operation.peer >= 0 and isinstance(error, PeerRefusedError):
            return PeerRefusedError(f"{operation}: {error}", (lane.group.ranks[operation.peer],))
        if isinstance(error, CollectiveMismatchError) and not error.place:
            unnamed, error = error, CollectiveMismatchError(f"{operation}: {error}")
            error.__cause__ = unnamed.__cause__
            if operation.peer >= 0:
                return error
        error = lane.world.diagnose(lane, error)
        if isinstance(error, PeerLostError) and not self._is_without(error.ranks):
            lane.lose(error)
        return error

    def _is_without(self, ranks: tuple[int, ...]) -> bool:
        """Whether no rank in ``ranks`` is a member: a message cannot connect if the store's rank is gone."""
        return bool(ranks) and set(ranks).isdisjoint(self._lane.group.ranks)

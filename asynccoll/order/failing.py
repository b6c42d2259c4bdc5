"""A call of a lane that fails: which error its waiter gets, who has to hear of it, and what else it costs.

It must not know how refusals are settled (``cut``), nor how a culprit is found (``needs.World``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccoll.errors import (
    AsyncCollError,
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
    PeerRefusedError,
    collective_error,
)

if TYPE_CHECKING:
    from asynccoll.order.cut import Epochs
    from asynccoll.order.job import Job
    from asynccoll.order.operation import Operation, Order
    from asynccoll.transport.completion import Completion

__all__ = ["Failing"]


class Failing:
    """Of one lane. ``not_taken`` is called with its lock held, the others without."""

    def __init__(self, lane: Order, epochs: Epochs) -> None:
        self._lane = lane
        self._epochs = epochs
        #: nothing more is issued: peers may be at another call of a program that broke off, or at a message
        self.out_of_step: bool = False

    def not_taken(self, error: BaseException, name: str, *, message: bool) -> None:
        """A library raised ``error`` instead of taking a call: raises a typed one, if that has no type."""
        if message:
            self._lose_messages(error)
        else:
            _, self._epochs.issued, *_ = self._epochs.places.next(name)
        if isinstance(error, RuntimeError) and not isinstance(error, AsyncCollError):
            raise collective_error(error, f"{name} on {self._lane}") from error

    def broke_off(self, job: Job, error: BaseException) -> None:
        """The program failed halfway: its peers wait for a rest that never comes, or are a call ahead.

        An error that all of them raise (a mismatch that they compared) does not count.
        """
        if not job.place:
            self._lose_messages(error)
            return
        lane = self._lane
        if isinstance(error, CollectiveError):
            # Of a call in parts the others may have made no more than this one: the rest of it is lost.
            if job.shares and isinstance(error, CollectiveMismatchError):
                lane.world.refuse(lane, error, job.place, spare=job.promise, part=job.part)
            return
        failure = collective_error(error, str(lane))
        if job.step is not None and job.step.done() and job.step.error() is not None:
            self._lose_soon(failure)
        elif not isinstance(failure, PeerLostError):
            lane.world.refuse(lane, error, job.place, spare=job.promise, part=job.part)

    def differs(self, found: CollectiveMismatchError, place: int, part: int, spare: Completion) -> None:
        """Others make another call there, or at an earlier place: that one is refused."""
        place, part = min(found.begins or (place, part), (place, part))
        self._lane.world.refuse(self._lane, found, place, spare=spare, part=part)

    def _lose_messages(self, error: BaseException) -> None:
        """The library has not taken a message: its receiver, or sender, would take the next one for it."""
        if not isinstance(error, AsyncCollError):  # such as a tag that it lacks: nothing was sent
            self._lose_soon(collective_error(error, f"a message on {self._lane}"))

    def _lose_soon(self, failure: CollectiveError) -> None:
        """Nothing more is issued until it is known what has failed; then the lane is lost."""
        self.out_of_step = True
        self._lane.world.find_out(self._lane, failure)

    def explain(self, operation: Operation, native: BaseException) -> AsyncCollError:
        """The typed error for ``native``; the world says which rank is the culprit."""
        lane = self._lane
        if isinstance(native, AsyncCollError) and not isinstance(native, CollectiveError):
            return native  # of this rank's own call, which broke off for that reason
        refusal = self._epochs.refusal_of(operation.sequence, operation.part)
        if refusal is not None and native is not lane.broken:
            own = refusal.rank == lane.world.rank and refusal.place == operation.sequence
            if not (own and refusal.why == f"{type(native).__name__}: {native}"):
                # Its peers have closed the communicator.
                return refusal.error(lane, operation.sequence, operation)
        if lane.broken is not None and not isinstance(native, CollectiveError):
            return lane.broken.for_waiter()  # with which the communicator was given up
        error = collective_error(native, str(operation))
        if operation.peer >= 0 and isinstance(error, (CollectiveMismatchError, PeerRefusedError)):
            # A library knows neither the ranks of the world nor the line.
            ranks = (lane.group.ranks[operation.peer],) if isinstance(error, PeerRefusedError) else ()
            return type(error)(f"{operation}: {error}", ranks)
        error = lane.world.diagnose(lane, error)
        if isinstance(error, PeerLostError) and not self._is_without(error.ranks):
            lane.lose(error)
        return error

    def _is_without(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks are no members: of a message that cannot be connected without their store."""
        return bool(ranks) and set(ranks).isdisjoint(self._lane.group.ranks)

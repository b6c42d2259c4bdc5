"""The runtime's record of one accepted operation; ``Work`` is the user's handle to it.

The lane holds operations strongly for as long as they are in flight, so that buffers outlive a
dropped handle; the user's ``Work`` may go at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asynccoll import host
from asynccoll.errors import AsyncCollError, CollectiveError, forget_frames
from asynccoll.host.call_number import call_name, message_name
from asynccoll.host.call_site import Place, Spot
from asynccoll.host.forks import renew
from asynccoll.transport.completion import Completion, Ready

if TYPE_CHECKING:
    from asynccoll.order.needs import Members, World
    from asynccoll.transport.communicator import Communicator

__all__ = ["Estimate", "Operation", "Order"]

#: An inline wait holds the loop, so it is for operations expected to end within this time.
INLINE_SECONDS = 1e-3
#: By so much a timer may be early.
EARLY_SECONDS = 1e-3
_wakers_lock = host.Lock()
renew(_wakers_lock)


class Estimate:
    """A running estimate of how long one kind and size of operation takes, in seconds."""

    __slots__ = ("name", "seconds")

    def __init__(self, name: str, size_bytes: int = 0) -> None:
        self.name: str = name
        # A first guess until something was seen: a round trip, and 1 GB/s.
        self.seconds: float = 2e-4 + size_bytes * 1e-9

    def took(self, seconds: float) -> None:
        """A waiter saw the operation end ``seconds`` after it was issued.

        One that was late (a peer was, or the scheduler) says little about the next: it counts as four
        times the estimate at most.
        """
        known = self.seconds
        self.seconds = known + 0.2 * (min(seconds, 4 * known) - known)

    def at_most(self, seconds: float) -> None:
        """The operation was found done: it took no longer than this."""
        self.seconds = min(self.seconds, seconds)


class Order(Protocol):
    """The lane that an operation is on, as far as it needs to know."""

    name: str
    key: str
    group: Members
    world: World
    broken: CollectiveError | None

    @property
    def epoch(self) -> int:
        """How often its ranks have come in step again after a refusal."""

    @property
    def communicator(self) -> Communicator | None:
        """The communicator that operations are issued on; None until it is open."""

    def explain_failure(self, operation: Operation, native: BaseException) -> AsyncCollError:
        """The typed error for ``native``, with its culprit named."""

    def follow_up(self, operation: Operation, name: str, completion: Completion) -> Operation:
        """What is left of ``operation`` when it is done."""

    def lose(self, error: CollectiveError) -> None:
        """A rank of the group is gone, or calls are out of step: give it up."""


class Operation:
    """One accepted operation: where it is in its lane's order, and how to tell that it is over."""

    __slots__ = (
        "__weakref__",
        "_spot",
        "_timeout",
        "_wakers",
        "completion",
        "deadline",
        "estimate",
        "failure",
        "lane",
        "over",
        "part",
        "peer",
        "sequence",
        "started",
        "tag",
        "ticket",
    )

    def __init__(
        self,
        lane: Order,
        estimate: Estimate,
        sequence: int,
        completion: Completion,
        spot: Spot,
        timeout: float,
        called: float,
    ) -> None:
        self.lane: Order = lane
        self.estimate: Estimate = estimate
        self.sequence: int = sequence
        self.completion: Completion = completion
        self._spot = spot
        #: when it was called: before its input was copied, and before the library was asked for it
        self.started: float = called
        self._timeout = timeout
        self.deadline: float = called + timeout
        #: somebody has seen it end well
        self.over: bool = False
        self.failure: AsyncCollError | None = None
        self.part: int = 1  # of those at its place
        self.peer: int = -1  # of a message: the index of the other rank
        self.tag: int = 0  # of a message
        self.ticket: int = 0  # of its record
        self._wakers: list[Callable[[], object]] | None = None

    @property
    def name(self) -> str:
        """Of the collective: ``all_reduce``."""
        return self.estimate.name

    @property
    def title(self) -> str:
        """``all_reduce #41``, or ``send to rank 1 (tag 0)``."""
        if self.peer < 0:
            return call_name(self.name, self.sequence)
        return message_name(self.name, self.lane.group.ranks[self.peer], self.tag)

    @property
    def place(self) -> Place:
        """The line that called it."""
        return self._spot.place

    def __repr__(self) -> str:
        return f"{self} ({'done' if self.done() else 'in flight'})"

    def __str__(self) -> str:
        return f"{self.title} on {self.lane} from {self.place}"

    def done(self) -> bool:
        """Whether waiting is over: the native operation is done, or we know that it never will be."""
        return self.over or self.failure is not None or self.completion.done()

    def landed(self) -> bool:
        """Whether its memory is no longer in use: ``done()``, and for the device as well."""
        return self.over or self.failure is not None or self.completion.landed()

    def saw_end(self, now: float) -> None:
        """It is seen to be over. Observers are told before the waiter goes on."""
        self.over = self.completion.fine and self.failure is None
        self.lane.world.recorder.ended(self.ticket, now)
        if self._wakers:
            self._wake()

    def attend(self) -> None:
        """A waiter begins: the world checks from time to time whether it can still complete."""
        world = self.lane.world
        world.recorder.waited(self.ticket, host.monotonic())
        world.watch_over(self)

    def leave(self) -> None:
        """Nobody does any more, or just now."""
        self.lane.world.watch_no_more(self)

    def give_up(self) -> None:
        """Nobody will, as far as this waiter knows, which was cancelled."""
        if not self.lane.world.watch_no_more(self):
            self.lane.world.recorder.given_up(self.ticket)

    def extend(self) -> None:
        """A waiter was told that its deadline has passed: the next wait has as long again."""
        now = host.monotonic()
        self.lane.world.recorder.timed_out(self.ticket, now)
        if now > self.deadline - EARLY_SECONDS:
            self.deadline = now + self._timeout

    def followed_by(self, estimate: Estimate, completion: Completion) -> Operation:
        """Another one at the same place and with the same time limit, which is over with ``completion``."""
        follower = Operation(
            self.lane, estimate, self.sequence, completion, self._spot, self._timeout, host.monotonic()
        )
        follower.deadline = self.deadline
        follower.part, follower.peer, follower.tag = self.part, self.peer, self.tag
        follower.ticket = self.ticket
        return follower

    def add_waker(self, waker: Callable[[], object]) -> Callable[[], object]:
        """Call ``waker`` once ``done()`` is true, at once if it is; returns a function that forgets it."""
        with _wakers_lock:
            first = self._wakers is None
            if first:
                self._wakers = []
            assert self._wakers is not None
            self._wakers.append(waker)
        if first:
            self.completion.add_callback(self._wake)
        if self.done():
            self._wake()
        return partial(self._forget_waker, waker)

    def _forget_waker(self, waker: Callable[[], object]) -> None:
        with _wakers_lock:
            if self._wakers and waker in self._wakers:
                self._wakers.remove(waker)

    def _wake(self) -> None:
        with _wakers_lock:
            wakers, self._wakers = self._wakers or [], []
        for waker in wakers:
            waker()

    def fail(self, error: CollectiveError) -> None:
        """End the waiting with ``error``, although the native operation may still be in flight."""
        if self.failure is None and not self.completion.done():
            self._fails(error)
            self.completion.abandon()
            self._wake()

    def refused(self, why: str) -> None:
        """It stands for a message that this rank refuses."""
        self.lane.world.recorder.refused(self.ticket, why, host.monotonic())

    def disown(self, error: CollectiveError) -> Completion:
        """In a forked child: it is the parent's. What must not be asked here any more, nor destroyed."""
        native = self.completion
        if not self.over:
            self.failure = error
            self.completion = Ready(error)
        return native

    def order(self) -> None:
        """Order the current device stream after it; the library may be told to wait here, and may fail."""
        try:
            self.completion.synchronize()
        except RuntimeError as error:
            self._fails(self.lane.explain_failure(self, error))

    def error(self) -> AsyncCollError | None:
        """Its error, as one of ours; None if it succeeded. Only once done. Kept: waiters raise a copy."""
        if self.failure is None and (native := self.completion.error()) is not None:
            self._fails(self.lane.explain_failure(self, native))
        return self.failure

    def _fails(self, error: AsyncCollError) -> None:
        forget_frames(error)  # its lane may keep it for long
        self.failure = error
        if isinstance(error, CollectiveError):
            error.operation = error.operation or self.name  # the first of those that fail with it
            error.lane = error.lane or self.lane.name
        self.lane.world.recorder.failed(self.ticket, str(error), host.monotonic())

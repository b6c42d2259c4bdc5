"""The runtime's record of one accepted operation; ``Work`` is the user's handle to it.

The lane holds operations strongly for as long as they are in flight, so that their buffers outlive the
user's ``Work``, which may be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from asynccoll import host
from asynccoll.errors import AsyncCollError, CollectiveError, forget_frames
from asynccoll.host.call_number import call_name, message_name
from asynccoll.host.call_site import Place, Spot
from asynccoll.host.forks import renew
from asynccoll.order.needs import Members, World
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Ready

#: A waiter blocks the event loop only for operations that are expected to complete within this time.
INLINE_SECONDS = 1e-3
#: How early a timer may fire.
EARLY_SECONDS = 1e-3
#: Reentrant: garbage collection may end a dropped coroutine that waits, in a thread that holds this.
_wakers_lock = host.RLock()
renew(_wakers_lock)


class Estimate:
    """A running estimate of how long one kind and size of operation takes, in seconds."""

    __slots__ = ("name", "seconds")

    def __init__(self, name: str, size_bytes: int = 0) -> None:
        self.name: str = name
        # A first guess until a waiter has measured one: a round trip, then 1 GB/s.
        self.seconds: float = 2e-4 + size_bytes * 1e-9

    def took(self, seconds: float) -> None:
        """Update the estimate: a waiter saw an operation end ``seconds`` after it was issued.

        An operation that was late (because of a peer or the scheduler) says little about the next one, so
        it counts as at most four times the estimate.
        """
        known = self.seconds
        self.seconds = known + 0.2 * (min(seconds, 4 * known) - known)

    def at_most(self, seconds: float) -> None:
        """Lower the estimate to ``seconds``: an operation was found done after that time."""
        self.seconds = min(self.seconds, seconds)


class Order(Protocol):
    """What an ``Operation`` needs from its lane."""

    name: str
    key: str
    group: Members
    world: World
    broken: CollectiveError | None

    @property
    def epoch(self) -> int:
        """The number of the current epoch (``cut``), from 0."""

    @property
    def communicator(self) -> Communicator | None:
        """The communicator that operations are issued on; None until it is open."""

    def explain_failure(self, operation: Operation, native: BaseException) -> AsyncCollError:
        """Return the typed error for ``native``, with its culprit named."""

    def follow_up(self, operation: Operation, name: str, completion: Completion) -> Operation:
        """Return a new operation for the work that follows ``operation``; it ends with ``completion``."""

    def lose(self, error: CollectiveError) -> None:
        """Give the lane up: a rank of the group is gone, or calls are out of step."""


class Operation:
    """One accepted operation: its place in its lane's order, its deadline, and whether it is over."""

    __slots__ = (
        "__weakref__",
        "_left_alone",
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
        "told",
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
        ticket: int,
    ) -> None:
        """``ticket``: the number of its record in the flight recorder."""
        self.lane: Order = lane
        self.estimate: Estimate = estimate
        self.sequence: int = sequence
        self.completion: Completion = completion
        self._spot = spot
        #: when the user called it: before its input was copied, and before the native call
        self.started: float = called
        self._timeout = timeout
        self.deadline: float = called + timeout
        #: whether a waiter has seen it end without an error
        self.over: bool = False
        self.failure: AsyncCollError | None = None
        #: whether waiting is over because of ``failure``, although the native operation may be in flight
        self.told: bool = False
        self.part: int = 1  # which part of the call at its place in the order it is, from 1 (``cut``)
        self.peer: int = -1  # for a message: the other rank's index in the group
        self.tag: int = 0  # for a message: its tag
        self.ticket: int = ticket
        self._left_alone: bool = False  # a wait for it was given up or late, so perhaps nobody sees its end
        self._wakers: list[Callable[[], object]] | None = None

    @property
    def name(self) -> str:
        """The name of the collective, as in ``all_reduce``."""
        return self.estimate.name

    @property
    def title(self) -> str:
        """The name with its place, or with its peer: ``all_reduce #41``, or ``send to rank 1 (tag 0)``."""
        if self.peer < 0:
            return call_name(self.name, self.sequence)
        return message_name(self.name, self.lane.group.ranks[self.peer], self.tag)

    @property
    def place(self) -> Place:
        """The source line that called it (its place in the order is ``sequence``)."""
        return self._spot.place

    def __repr__(self) -> str:
        return f"{self} ({'done' if self.done() else 'in flight'})"

    def __str__(self) -> str:
        return f"{self.title} on {self.lane} from {self.place}"

    def done(self) -> bool:
        """Whether waiting is over: the native operation is done, or was lost and waiters were told so."""
        return self.over or self.told or self.completion.done()

    def landed(self) -> bool:
        """Whether its memory is no longer in use: it is ``done()``, and the device has run it too."""
        return self.over or self.told or self.completion.landed()

    def holds_memory(self) -> bool:
        """Whether native code may still use its memory. A lost call may never end, but it may use none."""
        return self.completion.writing() if self.told else not self.completion.landed()

    def saw_end(self, now: float) -> None:
        """Note that a waiter found the operation over, and call the wakers before that waiter continues."""
        self.over = self.completion.fine and self.failure is None
        recorder = self.lane.world.recorder
        if self._left_alone:
            recorder.waited(self.ticket, now)  # after all
        recorder.ended(self.ticket, now)
        if self._wakers:
            self._wake()

    def attend(self) -> None:
        """Begin a wait: the world checks from now on whether the operation can still complete."""
        world = self.lane.world
        world.recorder.waited(self.ticket, host.monotonic())
        world.watch_over(self)

    def polled(self) -> None:
        """Note that the program polls, and so waits, although no call waits: the world checks from now on."""
        world = self.lane.world
        world.recorder.polled(self.ticket, host.monotonic())
        world.watch_over(self, waiters=0)

    def leave(self) -> None:
        """End a wait: the world stops checking on the operation for this waiter."""
        self.lane.world.watch_no_more(self)

    def give_up(self) -> None:
        """End the wait of a cancelled waiter; without another waiter, record the operation as given up."""
        if not self.lane.world.watch_no_more(self):
            self.lane.world.recorder.given_up(self.ticket)
            self._leave_alone()

    def _leave_alone(self) -> None:
        """Record the end of the operation without a waiter: a receive, say, takes a message all the same."""
        if not self._left_alone:
            self._left_alone = True
            self.completion.add_callback(self._ended_unseen)

    def _ended_unseen(self) -> None:
        if self.completion.error() is None:
            self.lane.world.recorder.ended(self.ticket, host.monotonic())

    def extend(self) -> None:
        """Record a timeout, and set a new deadline so that the next wait has the full timeout again."""
        now = host.monotonic()
        self.lane.world.recorder.timed_out(self.ticket, now)
        if now > self.deadline - EARLY_SECONDS:
            self.deadline = now + self._timeout
        self._leave_alone()

    def followed_by(self, estimate: Estimate, completion: Completion) -> Operation:
        """Return a new operation at the same place, with the same deadline; it ends with ``completion``."""
        follower = Operation(
            self.lane,
            estimate,
            self.sequence,
            completion,
            self._spot,
            self._timeout,
            host.monotonic(),
            self.ticket,
        )
        follower.deadline = self.deadline
        follower.part, follower.peer, follower.tag = self.part, self.peer, self.tag
        return follower

    def add_waker(self, waker: Callable[[], object]) -> Callable[[], object]:
        """Call ``waker`` once ``done()`` is true, immediately if it is. Returns a function that cancels this.

        The callback is added to the completion first: if Ctrl-C strikes before the waker is added, the next
        call adds the callback again.
        """
        if self._wakers is None:
            self.completion.add_callback(self._wake)
        with _wakers_lock:
            self._wakers = [*(self._wakers or ()), waker]
        if self.done():
            self._wake()
        return partial(self._forget_waker, waker)

    def attended(self, waker: Callable[[], object]) -> Callable[[], object]:
        """Add ``waker`` as a waiter; return a function that ends its wait."""
        forget = self.add_waker(waker)
        if self.done():
            return forget
        self.attend()
        return partial(host.call_each, (forget, self.give_up))

    @property
    def woke(self) -> bool:
        """Whether it is over and its wakers have been called, or another thread is about to call them."""
        return self._wakers is not None and not self._wakers

    def _forget_waker(self, waker: Callable[[], object]) -> None:
        with _wakers_lock:
            if self._wakers and waker in self._wakers:
                self._wakers.remove(waker)

    def _wake(self) -> None:
        with _wakers_lock:
            wakers, self._wakers = self._wakers or [], []
        host.call_each(wakers)

    def fail(self, error: CollectiveError) -> None:
        """Fail all waiters with ``error``, although the native operation may still be in flight."""
        self.lose(error)
        self.tell()

    def lose(self, error: CollectiveError) -> None:
        """Have the operation fail with ``error``: its waiters get that once nothing writes to its memory.

        A waiter may use the memory again, for another try. So unless the native operation ends, which then
        ends the waits, ``tell`` has to be called soon.
        """
        if self.failure is None and not self.completion.done():
            self._fails(error)
        if not self.completion.writing():
            self.tell()

    def tell(self) -> bool:
        """End all waits for it if it is lost, although native code may still write. Returns whether it is."""
        if self.failure is None:
            return False
        self.told = True
        self.completion.abandon()
        self._wake()
        return True

    def refused(self, why: str) -> None:
        """Record that this rank refuses the message that this operation stands for."""
        self.lane.world.recorder.refused(self.ticket, why, host.monotonic())

    def disown(self, error: CollectiveError) -> Completion:
        """Fail an operation of the parent with ``error``, in a forked child.

        Returns its native completion, which the child must neither use nor destroy.
        """
        native = self.completion
        if not self.over:
            self.failure = error
            self.completion = Ready(error)
        return native

    def order(self) -> None:
        """Order the current device stream after the operation. The backend may block here, and may fail."""
        try:
            self.completion.synchronize()
        except RuntimeError as error:
            self._fails(self.lane.explain_failure(self, error))

    def error(self) -> AsyncCollError | None:
        """Return its typed error; None if it succeeded. Call only once done; each waiter raises a copy."""
        if self.failure is None and (native := self.completion.error()) is not None:
            self._fails(self.lane.explain_failure(self, native))
        return self.failure

    def _fails(self, error: AsyncCollError) -> None:
        forget_frames(error)  # the lane may keep the error, whose frames would keep their variables alive
        self.failure = error
        if isinstance(error, CollectiveError):
            error.operation = error.operation or self.name  # the first of the operations that fail with it
            error.lane = error.lane or self.lane.name
        self.lane.world.recorder.failed(self.ticket, str(error), host.monotonic())

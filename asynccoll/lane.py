"""A lane: one order of operations on one communicator of one group.

Every rank must issue the operations of a communicator in the same order. A lane keeps that order: an
operation is accepted when the function is called and issued at once if nothing is queued before it.
A *program* (an operation of several native calls that depend on each other) is driven from its
completions, never from whoever waits for it, and what comes after it queues until it has issued its
last call.

What a lane must not know: what the operations mean, and which backend runs them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asynccoll import actors
from asynccoll.completion import READY, Completion, Promise, Ready
from asynccoll.errors import (
    AbortedError,
    CollectiveError,
    LaneOrderError,
    PeerLostError,
    collective_error,
)
from asynccoll.modes import as_called, program_as_called
from asynccoll.operation import Estimate, Operation
from asynccoll.place import NOWHERE, Place, Spot, caller
from asynccoll.stepping import Stepping, waiting

if TYPE_CHECKING:
    from asynccoll.backends.base import Communicator
    from asynccoll.costs import Cost
    from asynccoll.group import Group

__all__ = ["DEFAULT", "Lane", "Program", "Start"]

DEFAULT = "default"
BACKWARD = "/backward"
#: More calls than a rank makes between two joins.
ROUND = 1 << 30

#: So many streams have their owners kept.
_MOST_STREAMS = 4096

#: One native call, given the communicator.
Start = Callable[[Any], Completion]
#: Several: each yielded completion is waited for; the last call's is returned.
Program = Callable[[Any], Generator[Completion, None, Completion]]


_SETTLED = Promise()
_SETTLED.settle()


class Job:
    """A queued operation: how to start it, and the promise that its ``Operation`` waits on."""

    __slots__ = ("driven", "generator", "outlasts", "program", "promise", "start", "step", "unopened")

    def __init__(
        self,
        start: Start | None,
        program: Program | None,
        *,
        unopened: bool = False,
        message: bool = False,
        driven_by: Callable[[], object] | None = None,
    ) -> None:
        self.unopened = unopened  # needs no communicator
        self.outlasts = unopened or message  # in the next epoch it goes on: it is no call that meets others
        self.start = start
        self.program = program
        self.driven = driven_by is not None  # the waiter drives it, not its completions (``stepping``)
        self.promise = Promise() if driven_by is None else Stepping(self, driven_by)
        self.generator: Generator[Completion, None, Completion] | None = None
        self.step: Completion | None = None

    def let_go(self) -> None:
        """It is over. Its promise, which others may keep, knows the job, and the job all that was sent."""
        self.program = self.generator = None
        self.promise = _SETTLED


class _Owner:
    """Who issued last on an order, and where."""

    __slots__ = ("actor", "spot")

    def __init__(self) -> None:
        self.actor: Callable[[], actors.Actor] = _nobody  # a weak reference
        self.spot = NOWHERE


def _nobody() -> None:
    """The owner of an order on which nothing was issued."""


class Lane:
    """The order named ``name`` of ``group``; operations of equal lanes meet on all ranks."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name
        self.sequence = 0
        self.epoch = 0
        self.communicator: Communicator | None = None
        self.broken: CollectiveError | None = None
        self.routes: dict[Any, Any] = {}  # plans, and estimates, by what a tensor looks like
        self.cost: Cost | None = None  # what its ranks have agreed on (``costs``)
        self._context = group.context
        self._estimates: dict[tuple[str, int], Estimate] = {}
        self._in_flight: deque[Operation] = deque()  # of collectives, which end in order
        self._apart: list[Operation] = []  # what ends whenever it likes: messages, and what was given up
        self._owner = _Owner()
        self._owners: dict[object, _Owner] = {}  # of the streams
        self._together = False  # what is accepted now shares one place in the order
        self._checks_owner = group.context.checks_order and not name.endswith(BACKWARD)
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._turnstile = group.turnstile(name)
        self._admitted = False
        self._driving = False
        self._kicked = False
        self._opening = False
        self._retired: list[Communicator] = []

    def __str__(self) -> str:
        where = "the world" if self.group.is_world else f"ranks {list(self.group.ranks)}"
        return f"lane {self.name!r} of {where}"

    # Accepting operations

    def issue(
        self,
        estimate: Estimate,
        start: Start,
        size_bytes: int = 0,
        timeout: float | None = None,
        stream: object = None,
    ) -> Operation:
        """Accept an operation of one native call; issued before this returns if nothing is queued.

        ``estimate`` says which operation it is, and how long the likes of it take. ``stream`` names an
        order of its own within the lane (point-to-point messages of one peer and tag), which does not
        queue behind other streams.
        """
        with self._lock:
            owner = self._admitted_owner(stream)
            communicator = self.communicator
            if (
                communicator is None
                or self._queue
                or self._active is not None
                or self._driving
                or self._turnstile is not None
            ):
                job = Job(as_called(start), None, message=stream is not None)
                operation = self._enqueue(job, estimate, size_bytes, timeout, stream, owner)
            else:
                # First of all the start: what is noted down afterwards costs no latency.
                completion = start(communicator)
                return self._record(estimate, completion, size_bytes, timeout, stream, owner)
        self._start_queued()
        return operation

    def run(
        self,
        name: str,
        program: Program,
        size_bytes: int = 0,
        timeout: float | None = None,
        *,
        awaited_soon: bool = False,
    ) -> Operation:
        """Accept an operation of several native calls.

        ``awaited_soon``: its waiter is likely to come at once, and may then drive it (``stepping``).
        """
        program = program_as_called(program)
        estimate = self.estimate(name, size_bytes)
        awaited_soon = awaited_soon or waiting.get()
        with self._lock:
            owner = self._admitted_owner(None)
            if awaited_soon and self._is_free():
                job = Job(None, program, driven_by=self._drive)
                self._begin(job)
                operation = self._record(estimate, job.promise, size_bytes, timeout, None, owner)
            else:
                job = Job(None, program)
                operation = self._enqueue(job, estimate, size_bytes, timeout, None, owner)
        if isinstance(job.promise, Stepping):
            job.promise.offer()
        else:
            self._start_queued()
        return operation

    def _is_free(self) -> bool:
        """Whether the next operation may be issued by its caller. With the lock held."""
        return (
            self.communicator is not None
            and not self._queue
            and self._active is None
            and not self._driving
            and self._turnstile is None
        )

    def _begin(self, job: Job) -> None:
        """Issue the first calls of a program that its waiter may drive. With the lock held."""
        assert job.program is not None
        self._active = job
        job.generator = job.program(self.communicator)
        try:
            job.step = next(job.generator)
        except StopIteration as stop:  # it was the last
            self._active = None
            job.promise.follow(stop.value)
        except BaseException:  # refused by the native call itself, as it is for a single one
            self._active = None
            raise

    def _enqueue(
        self,
        job: Job,
        estimate: Estimate,
        size_bytes: int,
        timeout: float | None,
        stream: object,
        owner: _Owner,
    ) -> Operation:
        if self.communicator is None and not self._opening:
            self._open()
        self._queue.append(job)
        return self._record(estimate, job.promise, size_bytes, timeout, stream, owner)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is accepted inside is one call of the user's (a tree): one place in the order."""
        with self._lock:
            self._admitted_owner(None)
            self.sequence += 1
        self._together = True
        try:
            yield
        except BaseException:
            with self._lock:
                self.sequence -= 1  # the refusal, of which the peers are told, takes that place
            raise
        finally:
            self._together = False

    def _admitted_owner(self, stream: object) -> _Owner:
        """Check that the caller may issue here now; from now on it owns this order."""
        if self.broken is not None:
            raise self.broken.with_traceback(None)
        owner = self._owner if stream is None else self._stream_owner(stream)
        if self._checks_owner:
            node = actors.current()
            held = owner.actor()
            if held is not node.actor:
                if held is not None:
                    self._check_handover(node, held, owner.spot)
                owner.actor = weakref.ref(node.actor)
        return owner

    def _stream_owner(self, stream: object) -> _Owner:
        owner = self._owners.get(stream)
        if owner is None:
            if len(self._owners) >= _MOST_STREAMS:
                self._owners.clear()  # a tag for each message: who sent the old ones is of no interest
            owner = self._owners[stream] = _Owner()
        return owner

    def _check_handover(self, node: actors.Descent, held: actors.Actor, before: Spot) -> None:
        """Another actor follows on this order: only once its owner has ended, or as its descendant."""
        if actors.ended(held) or actors.descends(node, held) or actors.left(held, before.file):
            return
        raise self._crossing(node.actor, caller().place, held, before.place)

    def _crossing(
        self, actor: actors.Actor, place: Place, owner: actors.Actor, before: Place
    ) -> LaneOrderError:
        return LaneOrderError(
            f"{actors.label(actor)} issued a collective on {self} at {place}, but that lane belongs to "
            f"{actors.label(owner)}, which issued there at {before} and is still running. Two concurrent "
            "tasks on one lane can be scheduled in different order on different ranks, which gives wrong "
            "numbers. Give each task its own lane: lane='name' on the call, `with ac.lane('name'):` around "
            "it, or start the tasks in `ac.create_task_group()`"
        )

    def _record(
        self,
        estimate: Estimate,
        completion: Completion,
        size_bytes: int,
        timeout: float | None,
        stream: object,
        owner: _Owner,
    ) -> Operation:
        owner.spot = spot = caller()
        if stream is not None:
            sequence = 0  # messages of a stream have no place in the lane's order of collectives
        else:
            if not self._together:
                self.sequence += 1
            sequence = self.sequence
        context = self._context
        limit = context.timeout if timeout is None else timeout
        operation = Operation(self, estimate, sequence, completion, spot, limit)
        if stream is None:
            in_flight = self._in_flight
            while in_flight and ((first := in_flight[0]).over or first.completion.done() or first.failure):
                in_flight.popleft()
                if first.failure is not None:
                    self._keep_apart(first)
            in_flight.append(operation)
        else:
            self._keep_apart(operation)
        if context.observers:
            for observe in context.observers:
                observe(operation, size_bytes)
        return operation

    def _keep_apart(self, operation: Operation) -> None:
        """Hold on to its memory, which the native operation may still write to, out of the others' way."""
        self._apart = [one for one in self._apart if not one.completion.done()]
        self._apart.append(operation)

    # Issuing what is queued

    def _start_queued(self) -> None:
        with self._lock:  # or it may be about to issue its first call, and then there is nothing to hand over
            active = self._active
        if active is not None and isinstance(active.promise, Stepping):
            active.promise.hand_over()  # somebody else waits for its end now
        if self._turnstile is not None:
            self._turnstile.request(self)
        self._drive()

    def _drive(self) -> None:
        """Issue queued operations as far as possible; one thread at a time, in order."""
        with self._lock:
            if self._driving:
                self._kicked = True
                return
            self._driving = True
        try:
            self._issue_queued()
        except BaseException:  # Ctrl-C, where a waiter drives
            self._stop_driving()
            raise

    def _stop_driving(self) -> None:
        """Whoever drove was torn away, wherever he was: leave the rest to completions."""
        with self._lock:
            self._driving = self._kicked = False
            active = self._active
        if active is None or active.step is None:
            self._drive()
        else:
            active.driven = False
            active.step.add_callback(self._drive)

    def _issue_queued(self) -> None:
        while True:
            job = self._active
            if job is None:
                with self._lock:
                    if self._queue and self._may_start(self._queue[0]):
                        job = self._active = self._queue.popleft()
                    elif self._rest():
                        return
            elif job.step is not None and not job.step.done():
                with self._lock:
                    if self._rest():
                        return
            if job is not None and (job.step is None or job.step.done()):
                self._advance(job)

    def _may_start(self, job: Job) -> bool:
        if job.unopened:
            return True
        return self.communicator is not None and (self._turnstile is None or self._admitted)

    def admit(self) -> None:
        """The turnstile lets the next operation of this lane start."""
        self._admitted = True
        self._drive()

    def _rest(self) -> bool:
        """Give up driving, unless somebody called for it meanwhile. With the lock held."""
        if self._kicked:
            self._kicked = False
            return False
        self._driving = False
        return True

    def _advance(self, job: Job) -> None:
        """Start the job's next call; after its last one the lane is free for the next job."""
        interrupted: KeyboardInterrupt | None = None
        try:
            last = self._next_call(job)
        except BaseException as error:  # whatever a step raises belongs to its waiter, not to this thread
            last = Ready(error)
            if isinstance(error, KeyboardInterrupt):  # but this is meant for the thread
                interrupted = error
        if last is not None:
            with self._lock:
                if self._active is job:  # else the lane was restarted meanwhile
                    self._active = None
            job.promise.follow(last)
            if self._turnstile is not None and not job.unopened:
                self._admitted = False
                self._turnstile.release()
        elif not job.driven:
            assert job.step is not None
            job.step.add_callback(self._drive)
        if interrupted is not None:
            raise interrupted

    def _next_call(self, job: Job) -> Completion | None:
        """Make it; what comes back is the completion of the job's last."""
        if job.start is not None:
            return job.start(self.communicator)
        try:
            if job.step is not None and (error := job.step.error()) is not None:
                assert job.generator is not None
                job.step = job.generator.throw(error)
            else:
                if job.generator is None:
                    assert job.program is not None
                    job.generator = job.program(self.communicator)
                job.step = next(job.generator)
        except StopIteration as stop:
            last: Completion = stop.value
            return last
        return None

    # Opening, breaking, closing

    def open(self) -> None:
        """Open the communicator in the calling thread."""
        self._opening = True
        self._opened(self.group.context.backend.open(self.group, self.name, self.epoch), self.epoch)

    def _open(self) -> None:
        """Open it on a helper thread if opening waits for the other members; operations queue."""
        self._opening = True
        backend = self.group.context.backend
        if not backend.open_waits:
            self.communicator = backend.open(self.group, self.name, self.epoch)
            return
        threading.Thread(
            target=self._open_here, args=(self.epoch,), name=f"asynccoll-open-{self.name}", daemon=True
        ).start()

    def _open_here(self, epoch: int) -> None:
        try:
            communicator = self.group.context.backend.open(self.group, self.name, epoch)
        except BaseException as error:  # reported by every operation that waits for this lane
            if epoch == self.epoch:
                self.break_off(collective_error(error, f"opening {self}"))
            return
        self._opened(communicator, epoch)

    def _opened(self, communicator: Communicator, epoch: int) -> None:
        with self._lock:
            if epoch != self.epoch or self.broken is not None:
                self._retired.append(communicator)
                return
            self.communicator = communicator
        self._drive()

    def reopen(self) -> None:
        """Go on in a new epoch: the old communicator has half-matched operations on it."""
        with self._lock:
            if self.communicator is not None:
                self._retired.append(self.communicator)
            self.communicator = None
            self.cost = None  # whether all had agreed on it, nobody knows
            self.epoch += 1
            self._open()
        self._drive()

    def restart(self) -> None:
        """Reopen, forgetting what was accepted (but not the pauses in it, nor messages).

        Whoever calls this fails those operations.
        """
        with self._lock:
            self._queue = deque(job for job in self._queue if job.outlasts)
            active, self._active = self._active, None
        if active is not None and active.step is not None:
            active.step.abandon()
        self.reopen()

    def take_place(self) -> int:
        """Use up a place in the order, for a call that was refused; its sequence number."""
        with self._lock:
            self.sequence += 1
            return self.sequence

    def next_round(self) -> None:
        """Go on counting at the next round number: ranks that have made fewer calls then count alike."""
        with self._lock:
            self.sequence += ROUND - self.sequence % ROUND

    def pause(self, until: Callable[[], Completion]) -> None:
        """At this place in the order, issue nothing more until ``until()`` is done."""

        def program(_: Any) -> Generator[Completion, None, Completion]:
            yield until()
            return READY

        with self._lock:
            self._queue.append(Job(None, program, unopened=True))
        self._drive()

    def break_off(self, error: CollectiveError) -> None:
        """The lane is of no more use: fail what is out, refuse what comes."""
        with self._lock:
            if self.broken is None:
                self.broken = error
            queued, self._queue = list(self._queue), deque()
            if self._active is not None:
                queued.append(self._active)
                self._active = None
        for job in queued:
            if job.step is not None:
                job.step.abandon()
            job.promise.settle(error)
        for operation in self.outstanding():
            operation.fail(error)

    def explain_failure(self, operation: Operation, native: BaseException) -> CollectiveError:
        """The typed error for ``native``; the context says which rank is the culprit."""
        error = collective_error(native, f"{operation.name} #{operation.sequence} on {self}")
        error = self.group.context.diagnose(self, error)
        if isinstance(error, PeerLostError):
            self.lose(error)
        return error

    def lose(self, error: PeerLostError) -> None:
        """A rank of the group is gone: give the lane up, and let those who wait for us know."""
        self.break_off(error)
        self.group.context.pass_on(self)

    def estimate(self, name: str, size_bytes: int) -> Estimate:
        """What is known of how long such an operation takes."""
        kind = (name, size_bytes.bit_length())
        known = self._estimates.get(kind)
        if known is None:
            known = self._estimates[kind] = Estimate(name, size_bytes)
        return known

    def outstanding(self) -> list[Operation]:
        """The operations that are not done: collectives in order, then messages."""
        with self._lock:
            return [operation for operation in (*self._in_flight, *self._apart) if not operation.done()]

    def disown(self, error: CollectiveError) -> list[Completion]:
        """In a forked child: refuse what comes, fail what is in flight; what of it must not be destroyed."""
        self._lock = threading.Lock()
        self.broken = error
        return [operation.disown(error) for operation in (*self._in_flight, *self._apart)]

    def close(self, *, abort: bool = False) -> None:
        """Close the communicators; with ``abort``, fail what is out and let nobody wait for it."""
        if abort:
            self.break_off(AbortedError(f"{self} was aborted"))
        self._in_flight.clear()  # they hold native works, and those the connections
        self._apart.clear()
        communicators = [*self._retired, *([self.communicator] if self.communicator else [])]
        self._retired, self.communicator = [], None
        for communicator in communicators:
            if abort or communicator is not communicators[-1]:
                communicator.abort()
            communicator.close()

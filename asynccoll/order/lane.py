"""A lane: one order of operations on one communicator of one group.

Every rank must issue the operations of a communicator in the same order. A lane keeps that order: an
operation is accepted when the function is called and issued at once if nothing is queued before it.
A *program* (an operation of several native calls that depend on each other) is driven from its
completions, or by a waiter that comes at once (``stepping``): it goes on whether or not anybody waits.
What comes after it queues until it has issued its last call.

What a lane must not know: what the operations mean, and which backend runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from asynccoll import host
from asynccoll.errors import (
    AbortedError,
    AsyncCollError,
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
    PeerRefusedError,
    collective_error,
)
from asynccoll.flight import END
from asynccoll.host import profiling
from asynccoll.host.call_number import ROUND
from asynccoll.host.call_site import Spot, called_at, caller
from asynccoll.modes.captured import as_called
from asynccoll.order.connection import Connection
from asynccoll.order.cut import Cut, Refusal, Verdict
from asynccoll.order.job import Job, Program, Start, What, returned
from asynccoll.order.operation import Estimate, Operation
from asynccoll.order.outstanding import Outstanding
from asynccoll.order.ownership import Owner, Owners, Stream
from asynccoll.order.programs import program_as_called
from asynccoll.order.stepping import Stepping, waiting
from asynccoll.order.turns import Turns
from asynccoll.transport.completion import Completion, Promise, Ready
from asynccoll.transport.streams import on_stream

if TYPE_CHECKING:
    from asynccoll.order.needs import Compared, Members, Subject, World
    from asynccoll.order.start_order import Turnstile
    from asynccoll.plan.cost import Cost
    from asynccoll.transport.communicator import Communicator

__all__ = ["BACKWARD", "DEFAULT", "Lane"]

DEFAULT = "default"
BACKWARD = "/backward"

#: How often a waiter for a lane to open asks whether all ranks are still alive.
_ASK_SECONDS = 0.5
#: How soon it is noticed that a lane which is to be closed is over.
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02

#: What speaks against making a call: others make another one; or it is to be known first whether they do.
Objection = CollectiveMismatchError | Promise | None
#: An operation that will never end, and what to tell of it.
Lost = tuple[Operation, CollectiveError]


class Lane:
    """The order named ``name`` of ``group``; operations on lanes of one name match across ranks."""

    def __init__(
        self, group: Members, world: World, name: str, key: str = "", turnstile: Turnstile | None = None
    ) -> None:
        """``key``: by which its ranks meet; another one each time that a closed name is opened again.

        ``turnstile``: what it must pass before it starts an operation; None where any order will do.
        """
        self.group = group
        self.world = world
        self.name = name
        self.key: str = key or name
        #: each with those of the other ranks, before it is made
        self.compares_calls: bool = world.policy.check
        self.sequence: int = 0
        self._part = 0  # of those at the latest place
        self.epoch: int = 0
        self.broken: CollectiveError | None = None
        self.compared: Compared | None = None  # with what others call; None where that is done elsewhere
        self.refusals_seen = 0  # of how many it is known whether they are of this lane (``refusals``)
        self.routes: dict[object, Any] = {}  # plans, and estimates, by what a tensor looks like
        self.cost: Cost | None = None  # what its ranks have agreed on (``costs``)
        self._estimates: dict[tuple[str, int], Estimate] = {}
        self._out = Outstanding()
        self.turns: Turns = Turns()
        self._owners = Owners(checked=world.checks_order and not name.endswith(BACKWARD))
        self._together = False  # what is accepted now shares one place in the order
        self._whole: What = None  # what that call is
        self._before: Callable[[], object] | None = None  # what is to be accepted before anything else is
        self._started = 0  # the highest place that was queued and issued since
        self._touched = 0  # the place of the latest call that failed while it was being issued
        self._lock = host.Lock()
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._out_of_step = False  # a program broke off halfway: its peers may be at another of its calls
        self._turnstile = turnstile
        self._admitted: int | None = None  # the epoch for which the turnstile lets one operation start
        self._driving = False
        self._kicked = False
        self._cut: Cut | None = None  # something is refused, see there; None in the normal case
        self._settled: Verdict | None = None  # the latest
        self._recorder = world.recorder
        self.number: int = self._recorder.lane(group.key, self.key)
        self._connection = Connection(name, partial(world.open, self), self._opened, self._failed_to_open)

    def __str__(self) -> str:
        where = "the world" if self.group.is_world else f"ranks {list(self.group.ranks)}"
        return f"lane {self.name!r} of {where}"

    @property
    def communicator(self) -> Communicator | None:
        """On which its operations are issued now; None until it is open."""
        return self._connection.communicator

    @property
    def sent_together(self) -> str:
        """What the call that is being made now is sent together with; "" in the normal case."""
        return self._whole if isinstance(self._whole, str) else ""

    # Accepting operations

    def issue(
        self,
        estimate: Estimate,
        start: Start,
        size_bytes: int = 0,
        timeout: float | None = None,
        stream: Stream | None = None,
        of: Subject | None = None,
        what: What = None,
        called: float | None = None,
    ) -> Operation:
        """Accept an operation of one native call; issued before this returns if nothing is queued.

        ``estimate`` says which operation it is, and how long the likes of it take. ``stream`` names an
        order of its own within the lane (point-to-point messages of one peer and tag), which does not
        queue behind other streams. ``what`` is what has to be the same on all ranks; ``of``, what it is of,
        for the record; ``called``, when the user called it, if not now.
        """
        spot = caller()
        called = host.monotonic() if called is None else called
        if self._before is not None:
            self._accept_before()
        found: Objection = None
        completion: Completion | None = None
        with self._lock:
            owner = self._admitted_owner(stream)
            if self._is_free() or (stream is not None and self._only_awaits_others()):
                # First of all the start: what is noted down afterwards costs no latency.
                try:
                    if stream is None:
                        found = self._announce(what or estimate.name, called_at.get() or spot)
                    completion = self._made_unless(found, start)
                except BaseException as error:  # refused by the library, which may have sent something
                    if (typed := self._not_taken(error, estimate.name, stream)) is not None:
                        raise typed from error
                    raise
            if completion is not None:
                operation = self._record(
                    estimate, completion, timeout, stream, owner, spot, size_bytes, of, called
                )
            else:
                whole = self._of_whole(what or estimate.name)
                job = Job(as_called(start), None, what=whole, gate=_gate(found))
                operation = self._enqueue(job, estimate, timeout, stream, owner, spot, size_bytes, of, called)
        if completion is None:
            self._start_queued()
        elif isinstance(found, CollectiveMismatchError):
            self._refuse_differing(found, operation.sequence, operation.part, completion)
        if self.world.observers or profiler._is_profiler_enabled:
            self._show(operation, size_bytes)
        return operation

    def run(
        self,
        name: str,
        program: Program,
        size_bytes: int = 0,
        timeout: float | None = None,
        *,
        what: What = None,
        awaited_soon: bool = False,
        sent: Callable[[], Iterable[Completion]] = tuple,
        of: Subject | None = None,
        called: float | None = None,
    ) -> Operation:
        """Accept an operation of several native calls; ``what`` is as for ``issue``.

        ``awaited_soon``: its waiter is likely to come at once, and may then drive it (``stepping``).
        ``sent``: what the program has started so far, and does not wait for before it goes on. ``of`` and
        ``called``: see ``issue``.
        """
        called = host.monotonic() if called is None else called
        if self._before is not None:
            self._accept_before()
        spot = caller()
        program = program_as_called(program)
        estimate = self.estimate(name, size_bytes)
        awaited_soon = awaited_soon or waiting.get()
        found: Objection = None
        with self._lock:
            owner = self._admitted_owner(None)
            whole, free = self._of_whole(what or name), awaited_soon and self._is_free()
            if free:
                found = self._announce(what or name, called_at.get() or spot)
            if free and not isinstance(found, Promise):
                job = Job(None, program, what=whole, driven_by=self._drive, sent=sent)
                promise: Completion = Ready(found)
                if found is None:
                    self._begin(job, name)
                    promise = job.promise
                operation = self._record(
                    estimate, promise, timeout, None, owner, spot, size_bytes, of, called
                )
                job.place, job.part, job.called = operation.sequence, operation.part, spot
                job.shares = self._together
            else:
                job = Job(None, program, what=whole, sent=sent, gate=_gate(found))
                operation = self._enqueue(job, estimate, timeout, None, owner, spot, size_bytes, of, called)
                promise = job.promise
        if isinstance(found, CollectiveMismatchError):
            self._refuse_differing(found, operation.sequence, operation.part, promise)
        elif isinstance(promise, Stepping):
            promise.offer()
        else:
            self._start_queued()
        if self.world.observers or profiler._is_profiler_enabled:
            self._show(operation, size_bytes)
        return operation

    def _show(self, operation: Operation, size_bytes: int) -> None:
        """Tell the observers. Without the lock, which an observer of a program's end takes itself."""
        for observe in self.world.observers:
            observe(operation, size_bytes)
        if profiler._is_profiler_enabled:
            operation.add_waker(profiling.begin(f"asynccoll.{operation.name} [{self.name}]"))

    def _is_free(self) -> bool:
        """Whether the next operation may be issued by its caller. With the lock held."""
        return (
            self._connection.communicator is not None
            and not self._queue
            and self._active is None
            and not self._driving
            and self._turnstile is None
            and self._cut is None
            and not self._out_of_step
            and not (self._together and self._given_up() is not None)
        )

    def _only_awaits_others(self) -> bool:
        """Whether a collective holds up all the rest until it is known what other ranks call.

        A message must not wait for it: its receiver may have to have it before it calls that. With the lock
        held.
        """
        first = self._active or (self._queue[0] if self._queue else None)
        return (
            first is not None
            and first.gate is not None
            and self._connection.communicator is not None
            and self._cut is None
            and not self._out_of_step
            and all(job.place for job in self._queue)
        )

    def _made_unless(self, found: Objection, start: Start) -> Completion | None:
        """Make the call, if nothing is found against it; None if that is not known yet."""
        if found is None:
            return returned(start(self._connection.opened()))
        return Ready(found) if isinstance(found, CollectiveMismatchError) else None

    def _announce(self, what: What, spot: Spot) -> Objection:
        """Announce the call about to be issued. With the lock held."""
        if self._together:
            return self._tell_what(self._of_whole(what), spot, self.sequence, self._part + 1, True)
        return self._tell_what(what, spot, self.sequence + 1, 1, False)

    def _tell_what(self, what: What, spot: Spot, place: int, part: int, shares: bool) -> Objection:
        """Tell a communicator that wants to know, or the comparison of calls."""
        announce = getattr(self._connection.communicator, "announce", None)
        if self.compares_calls:  # what differs is found before, and told all alike
            if announce is not None:
                announce(None, spot, place, part, False)
            return None
        if announce is not None:
            announce(what, spot, place, part, shares)
        return None if self.compared is None else self.compared.call(what, spot, place, part)

    def _of_whole(self, what: What) -> What:
        return (self._whole, what) if self._together else what

    def _objection(self, job: Job) -> Objection:
        """The same of a queued call, or of the next step of a program."""
        if job.gate is None:
            shares = job.shares or job.program is not None
            found = self._tell_what(job.what, job.called, job.place, job.part, shares) if job.place else None
            if not isinstance(found, Promise):
                return found
            job.gate = found
        if not job.gate.done():
            job.step = job.gate
            return job.gate
        error, job.gate, job.step = job.gate.error(), None, None
        assert error is None or isinstance(error, CollectiveMismatchError)
        return error

    def _not_taken(self, error: BaseException, name: str, stream: Stream | None) -> CollectiveError | None:
        """A library raised ``error`` instead of taking a call: what the caller is told, if it has no type."""
        if stream is None:
            self._touched = self.sequence + (not self._together)
        else:
            self._lose_messages(error)
        foreign = isinstance(error, RuntimeError) and not isinstance(error, AsyncCollError)
        return collective_error(error, f"{name} on {self}") if foreign else None

    def _begin(self, job: Job, name: str) -> None:
        """Issue the first calls of a program that its waiter may drive. With the lock held."""
        assert job.program is not None
        self._active = job
        job.generator = job.program(self._connection.opened())
        try:
            job.step = returned(next(job.generator))
        except StopIteration as stop:  # that was its last call
            self._active = None
            job.promise.follow(returned(stop.value))
        except BaseException as error:  # refused by the native call itself, as it is for a single one
            self._active = None
            if (typed := self._not_taken(error, name, None)) is not None:
                raise typed from error
            raise

    def _enqueue(
        self,
        job: Job,
        estimate: Estimate,
        timeout: float | None,
        stream: Stream | None,
        owner: Owner,
        spot: Spot,
        size_bytes: int,
        of: Subject | None,
        called: float,
    ) -> Operation:
        if self.communicator is None and not self._connection.is_opening:
            self._connection.open(waits=self.world.open_waits)
        operation = self._record(
            estimate, job.promise, timeout, stream, owner, spot, size_bytes, of, called, queued=True
        )
        job.called = called_at.get() or spot
        job.place, job.part, job.shares = operation.sequence, operation.part, self._together
        job.ticket = operation.ticket
        cut = self._cut
        if job.shares and job.place and (refusal := self._given_up()) is not None:
            operation.fail(refusal.error(self, job.place))
        elif cut is None or not cut.refusal.loses(job.place, job.part):
            self._queue.append(job)
        elif cut.verdict is None and job.place == cut.place:  # lost, whatever the verdict will be
            operation.fail(cut.refusal.error(self, job.place))
        elif cut.verdict is None:
            cut.held.append(job)
        elif job.place < cut.verdict.resumes:  # its peers have given it up already
            operation.fail(cut.verdict.refusal.error(self, job.place))
        else:
            self._cut = None
            self._queue.append(job)
        return operation

    def _given_up(self) -> Refusal | None:
        """The refusal with which the latest place was lost: settled, perhaps, since a block took it."""
        settled = self._settled
        return settled.refusal if settled is not None and settled.covers(self.sequence) else None

    @contextmanager
    def after(self, before: Callable[[], object]) -> Iterator[None]:
        """What is accepted inside comes after what ``before`` issues; not called if all of it is refused."""
        self._before = before
        try:
            yield
        finally:
            self._before = None

    def _accept_before(self) -> None:
        before, self._before = self._before, None
        assert before is not None
        before()

    @contextmanager
    def together(self, place: int | None = None, what: What = None, name: str = "") -> Iterator[int]:
        """What is accepted inside is one call of the user's (a tree): one place in the order, which it gives.

        ``name``: of that call.

        ``what`` has to be the same on all ranks, of each part of it that is accepted inside.

        With ``place``, where the latest call took that one, it goes on with that call: raises what became of
        it, ``PeerRefusedError`` or ``CollectiveMismatchError``, if it was refused meanwhile. If the block
        fails its place is refused, whatever of it was issued. Inside another such block it is a part of that.
        """
        with self._lock:
            self._admitted_owner(None)
            inner = self._together
            if not inner:
                if place is None or place != self.sequence:
                    self.sequence += 1
                    self._part = 0
                elif (settled := self._settled) is not None and settled.covers(place):
                    raise settled.refusal.error(self, place)
                self._together = True
            before, self._whole = self._whole, what or (self._whole if inner else None)
            place = self.sequence
        if inner:
            try:
                yield place
            finally:
                self._whole = before
            return
        try:
            yield place
        except BaseException as error:
            self._together = False
            self.world.refuse(self, error, place, name=name)
            raise
        finally:
            self._together = False

    def _admitted_owner(self, stream: Stream | None) -> Owner:
        """Check that the caller may issue here now; it owns this order from now on."""
        if self.broken is not None:
            raise self.broken.for_waiter()
        return self._owners.admit(stream, self)

    def _record(
        self,
        estimate: Estimate,
        completion: Completion,
        timeout: float | None,
        stream: Stream | None,
        owner: Owner,
        spot: Spot,
        size_bytes: int,
        of: Subject | None,
        called: float,
        *,
        queued: bool = False,
    ) -> Operation:
        owner.spot = spot
        if stream is not None:
            sequence = 0  # messages of a stream have no place in the lane's order of collectives
        else:
            if not self._together:
                self.sequence += 1
                self._part = 0
            sequence = self.sequence
            self._part += 1
        world = self.world
        limit = world.timeout if timeout is None else timeout
        spot = called_at.get() or spot
        operation = Operation(self, estimate, sequence, completion, spot, limit, called)
        if stream is None:
            operation.part = self._part
            self._out.add(operation)
        else:
            _, operation.peer, operation.tag = stream
            self._out.add_apart(operation)
        recorder = self._recorder
        # Addresses stand for what is longer to compare; what is at them is kept for as long as that counts.
        key = (
            (estimate, id(spot[0]), spot[1])
            if of is None
            else (estimate, id(of.plan), of.shape, id(spot[0]), spot[1])
        )
        operation.ticket = recorder.note(
            recorder.texts.get(key) or self._describe(key, estimate, spot, of),
            self.number,
            sequence,
            operation.part if stream is None else operation.tag,
            operation.peer,
            size_bytes,
            called,
            0.0 if queued else called,
        )
        return operation

    def _describe(self, key: Hashable, estimate: Estimate, spot: Spot, of: Subject | None) -> int:
        """The text that is recorded for operations of this kind."""
        said = "" if of is None else of.described()
        parts = (self.group.key, self.key, self.name, estimate.name, said, str(spot.place))
        return self._recorder.learn(key, parts, (estimate, spot, of and of.plan))

    def follow_up(self, operation: Operation, name: str, completion: Completion) -> Operation:
        """What follows on ``operation`` once it is done: an operation with its place and its time limit."""
        with self._lock:
            if self.broken is not None:
                raise self.broken.for_waiter()
            estimate = self.estimate(f"{name} of {operation.name}", 0)
            follower = operation.followed_by(estimate, completion)
            self._out.add_apart(follower)
            return follower

    # Issuing what is queued

    def _start_queued(self) -> None:
        with self._lock:  # or it may be about to issue its first call, and then there is nothing to hand over
            active = self._active
            promise = None if active is None else active.promise  # once: it may be over any moment
        if isinstance(promise, Stepping):
            promise.hand_over()  # somebody else waits for its end now
        if self._turnstile is not None:
            self._turnstile.request(self)
        self._drive()

    def _drive(self) -> None:
        """Issue queued operations as far as possible: in order, and in one thread at a time."""
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
        """The driving waiter was interrupted, at any point: leave the rest to completions."""
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
                        self._started = job.place or self._started
                        self._recorder.begun(job.ticket, host.monotonic())
                    elif self._rest():
                        break
            elif job.step is not None and not job.step.done():
                with self._lock:
                    if self._rest():
                        break
            if job is not None and (job.step is None or job.step.done()):
                self._advance(job)
        if self._admitted is not None:
            self._pass_up()

    def _may_start(self, job: Job) -> bool:
        if self.communicator is None or self._out_of_step:
            return False
        return self._turnstile is None or not job.place or self._admitted == self.epoch

    # What the turnstile asks and says

    def next_epoch_to_pass(self) -> int | None:
        """The epoch of the next operation that waits for the turnstile; None if none does."""
        with self._lock:
            return self.epoch if any(job.place for job in self._queue) else None

    def admit(self, epoch: int) -> None:
        """The turnstile lets the next operation of this lane start: that of the first rank's ``epoch``."""
        with self._lock:
            self._admitted = epoch
        self._drive()

    def _pass_up(self) -> None:
        """Go through the turnstile with nothing, where the operation that was to was given up."""
        with self._lock:
            cut = self._cut
            halted = cut is not None and cut.verdict is None and self._has_all_below(cut.refusal)
            barren = halted and not self._queue and self._active is None
            if self._admitted is None or self._admitted > self.epoch:  # the first rank has settled before us
                return
            if self._admitted == self.epoch and not barren:
                return
            self._admitted = None
        assert self._turnstile is not None
        self._turnstile.release()

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
            last = self._next_unless_refused(job)
        except BaseException as error:  # whatever a step raises belongs to its waiter, not to this thread
            last = Ready(error)
            if isinstance(error, KeyboardInterrupt):  # but this is meant for the thread
                interrupted = error
            self._refuse_rest(job, error)
        if last is not None:
            with self._lock:
                mine = self._active is job  # else it was given up meanwhile, and the turnstile told
                if mine:
                    self._active = None
                passed = mine and job.place > 0 and self._admitted is not None
                if passed:
                    self._admitted = None
            job.promise.follow(last)
            if passed and self._turnstile is not None:
                self._turnstile.release()
        elif not job.driven:
            assert job.step is not None
            job.step.add_callback(self._drive)
        if interrupted is not None:
            raise interrupted

    def _refuse_rest(self, job: Job, error: BaseException) -> None:
        """The program failed halfway: its peers wait for a rest that never comes, or are a call ahead.

        An error that all of them raise (a mismatch that they compared) does not count.
        """
        if self._active is not job:
            return
        if not job.place:
            self._lose_messages(error)
            return
        if isinstance(error, CollectiveError):
            # Of a call in parts the others may have made no more than this one: the rest of it is lost.
            if job.shares and isinstance(error, CollectiveMismatchError):
                self.world.refuse(self, error, job.place, spare=job.promise, part=job.part)
            return
        failure = collective_error(error, str(self))
        if job.step is not None and job.step.done() and job.step.error() is not None:
            self._lose_soon(failure)
        elif not isinstance(failure, PeerLostError):
            self.world.refuse(self, error, job.place, spare=job.promise, part=job.part)

    def _lose_messages(self, error: BaseException) -> None:
        """The library has not taken a message: its receiver, or sender, would take the next one for it."""
        if not isinstance(error, AsyncCollError):  # such as a tag that it lacks: nothing was sent
            self._lose_soon(collective_error(error, f"a message on {self}"))

    def _lose_soon(self, failure: CollectiveError) -> None:
        """Nothing more is issued until it is known what has failed; then the lane is lost."""
        self._out_of_step = True
        self.world.find_out(self, failure)

    def _next_unless_refused(self, job: Job) -> Completion | None:
        """``_next_call``, if nothing is found against it; None also if that is not known yet."""
        found = self._objection(job)
        if found is None:
            return on_stream(job.stream, self._next_call, job)
        if isinstance(found, Promise):
            return None
        self._refuse_differing(found, job.place, job.part, job.promise)
        return Ready(found)

    def _refuse_differing(
        self, found: CollectiveMismatchError, place: int, part: int, spare: Completion
    ) -> None:
        """Others make another call there, or at an earlier place: that one is refused."""
        place, part = min(found.begins or (place, part), (place, part))
        self.world.refuse(self, found, place, spare=spare, part=part)

    def _next_call(self, job: Job) -> Completion | None:
        """Make it; what comes back is the completion of the job's last."""
        if job.start is not None:
            return returned(job.start(self._connection.opened()))
        try:
            if job.step is not None and (error := job.step.error()) is not None:
                assert job.generator is not None
                job.step = job.generator.throw(error)
            else:
                if job.step is not None and job.step.stream_ordered:
                    job.step.synchronize()  # what the program computes of it comes after it
                if job.generator is None:
                    assert job.program is not None
                    job.generator = job.program(self._connection.opened())
                job.step = returned(next(job.generator))
        except StopIteration as stop:
            return returned(stop.value)
        return None

    # Refusals: see ``cut`` for what holds, and why

    @property
    def is_halted(self) -> bool:
        """Whether a refused call is being settled."""
        return self._cut is not None

    @property
    def is_settling(self) -> bool:
        """Whether peers may still ask this rank which of its calls a refusal cancels.

        Not while it has calls to make below the refused one: until then it cannot answer.
        """
        cut = self._cut
        if cut is None or cut.verdict is not None or self.broken is not None:
            return False
        return cut.stated or self._has_all_below(cut.refusal)

    def refuse(
        self,
        why: str,
        place: int | None,
        spare: Completion | None = None,
        part: int | None = None,
        name: str = "",
    ) -> Cut | None:
        """This rank does not make the call at ``place`` (None: its next one). The cut, if this begins one.

        Nor what is left of it from ``part`` on; None: after what was accepted last. Whoever waits for
        ``spare`` is told otherwise. ``name``: of the call, if it was made just now and is not recorded yet.
        """
        with self._lock:
            if self.broken is not None:
                return None
            if place is not None and self._settled is not None and self._settled.covers(place):
                return None  # it was lost already
            peak = self._peak()
            if place is None:
                self.sequence = place = self.sequence + 1
                self._part = 0
            accepted = self._part if place == self.sequence else 0
            stands = accepted if part is None else part - 1
            if name:
                self._record_refused(name, place, stands + 1, -1, why)
            begun, lost = self._halt(Refusal(self.world.rank, place, why, stands), peak)
        self._fail_all([one for one in lost if one[0].completion is not spare])
        return begun

    def end_of_parts(self, place: int) -> None:
        """The call at ``place``, made in parts, has no more of them: for peers that wait for another."""
        with self._lock:
            if place == self.sequence and self._cut is None and self._given_up() is None:
                spot, now = called_at.get() or caller(), host.monotonic()
                key = (END, self.number, id(spot[0]), spot[1])
                text = self._recorder.texts.get(key) or self._describe(key, Estimate(END), spot, None)
                ticket = self._recorder.note(text, self.number, place, self._part + 1, -1, 0, now, now)
                self._recorder.ended(ticket, now)

    def note_refused(self, name: str, peer: int, tag: int, why: str) -> None:
        """The caller has called for a message, which is refused, and nobody is told."""
        with self._lock:
            self._record_refused(name, 0, tag, peer, why)

    def _record_refused(self, name: str, place: int, part: int, peer: int, why: str) -> None:
        """What the caller has called is not made: for peers that miss it, and for tools."""
        recorder, now = self._recorder, host.monotonic()
        text = self._describe(("refused", name), Estimate(name), called_at.get() or caller(), None)
        ticket = recorder.note(text, self.number, place, part, peer, 0, now, now)
        recorder.refused(ticket, why, now)

    def hear(self, epoch: int, refusal: Refusal) -> Cut | None:
        """A peer has refused a call in ``epoch``. The cut, if this begins one."""
        with self._lock:
            if self.broken is not None or epoch != self.epoch or (self._cut and self._cut.verdict):
                return None
            begun, lost = self._halt(refusal, self._peak())
        self._fail_all(lost)
        return begun

    def _fail_all(self, lost: list[Lost]) -> None:
        for operation, error in lost:
            operation.fail(error)
        self._drive()

    def _peak(self) -> int:
        """The highest place of which something may have been issued. With the lock held."""
        known = max(self._started, self._touched)
        if self._cut is not None and self._cut.verdict is None:
            return max(self._cut.peak, known)
        first = next((job for job in self._queue if job.place), None)
        # One that others were told of counts: it is not announced once more.
        queued = self.sequence if first is None else first.place - (not first.shares and first.gate is None)
        return max(queued, known)

    def _halt(self, refusal: Refusal, peak: int) -> tuple[Cut | None, list[Lost]]:
        """Issue nothing at or above the refused place; what is in flight there is lost. Called locked."""
        cut, place, begun = self._cut, refusal.place, None
        own = refusal.rank == self.world.rank
        if (
            cut is not None and cut.verdict is not None
        ):  # settled, and this rank on its way to where it resumes
            if place < cut.verdict.resumes:
                return None, []
            cut = None
        if cut is None:
            cut = begun = self._cut = Cut(self.epoch, refusal, peak)
        elif refusal.begins >= cut.refusal.begins or cut.stated:
            if own and (cut.stated or place > cut.place):
                cut.hold(refusal)  # it may belong to the next epoch
            return None, []
        cut.refusal, cut.peak = refusal, peak
        if own:
            cut.claim(refusal)
        above = [job for job in self._queue if refusal.loses(job.place, job.part)]
        self._queue = deque(job for job in self._queue if not refusal.loses(job.place, job.part))
        cut.hold(*above)
        active = self._active
        if active is not None and refusal.loses(active.place, active.part):
            self._give_up(active)
        return begun, self._lost(place, max(place, peak), cut.refusal)

    def is_over(self, place: int) -> bool:
        """Whether all calls up to that place are over here. With the lock held."""
        first = next(iter(self._out.collectives), None)
        return first is None or first.sequence > place

    def _give_up(self, active: Job) -> None:
        self._active = None
        active.abandon()

    def _lost(self, first: int, last: int, refusal: Refusal) -> list[Lost]:
        """What is in flight from ``first`` to ``last``, with the error of each."""
        return [
            (operation, refusal.error(self, operation.sequence))
            for operation in self._out
            if first <= operation.sequence <= last and refusal.loses(operation.sequence, operation.part)
        ]

    def conclude(self, cut: Cut) -> bool:
        """Whether all below the cut is over here: then this rank can say how far it went, and that stands."""
        with self._lock:
            if not cut.stated and self._cut is cut and self._is_quiet(cut.refusal):
                cut.state(self._peak())
            return cut.stated

    def _is_quiet(self, refusal: Refusal) -> bool:
        return (
            self._has_all_below(refusal)
            and not self._together
            and not self._driving
            and (self._active is None or not self._active.place)
            and not any(job.place for job in self._queue)
            and all(op.landed() for op in self._out.collectives if not refusal.loses(op.sequence, op.part))
        )

    def _has_all_below(self, refusal: Refusal) -> bool:
        """Whether everything that is not lost has been accepted here."""
        place, stands = refusal.begins
        return (self.sequence, self._part) >= ((place, stands) if stands else (place - 1, 0))

    def resume(self, cut: Cut, verdict: Verdict) -> Cut | None:
        """All ranks have stated how far they went: go on where all do. The next cut, if one is waiting."""
        with self._lock:
            if self.broken is not None or self._cut is not cut:
                return None
            self.epoch += 1
            if self.compared is not None:
                self.compared.restart(self.epoch)
            cut.verdict = self._settled = verdict
            lost = self._lost(verdict.refusal.place, verdict.resumes - 1, verdict.refusal)
            retired = None
            if not verdict.in_step:  # it has half-matched operations on it
                self.cost = None  # it is unknown whether all had agreed on it
                retired = self._connection.replace(self.epoch, waits=self.world.open_waits)
            if self.sequence >= verdict.resumes - 1:
                self._cut = None
            begun = self._replay(cut, verdict.resumes)
            waiting = len(self._queue)
        if self._turnstile is not None:
            for _ in range(waiting):
                self._turnstile.request(self)
        self._fail_all(lost)
        if retired is not None:
            self._connection.retire(retired)
        return begun

    def _replay(self, cut: Cut, resumes: int) -> Cut | None:
        """Queue what was held and is still wanted, up to the next refusal in it. With the lock held."""
        begun: Cut | None = None
        held = [one for one in cut.held if one.place >= resumes]
        cut.held.clear()
        first = next((one for one in held if isinstance(one, Refusal)), None)
        if first is not None:
            begun = self._cut = Cut(self.epoch, first, first.place - 1)
            begun.mine = first
        for one in held:
            if isinstance(one, Job) and not (begun and begun.refusal.loses(one.place, one.part)):
                self._queue.append(one)
            elif begun is not None and one is not first:
                begun.hold(one)
        return begun

    # Opening, breaking, closing

    def open(self) -> None:
        """Open the communicator, and wait for it.

        Raises:
            PeerLostError: a rank that was there has gone meanwhile.
        """
        with self._lock:
            self._connection.open(waits=self.world.open_waits)
        while not self._connection.wait(_ASK_SECONDS):
            lost = self.world.loss(self)
            if lost is not None:
                self.break_off(lost)
        if self.broken is not None:
            self._connection.join()
            raise self.broken.for_waiter()

    def _opened(self, epoch: int, communicator: Communicator) -> None:
        """A helper thread has opened it."""
        with self._lock:
            wanted = self.broken is None and self._connection.is_for(epoch)
            if wanted:
                self._connection.install(communicator)
        if wanted:
            self._drive()
        else:
            self._connection.retire(communicator)

    def _failed_to_open(self, epoch: int, error: BaseException) -> None:
        """A helper thread could not: every operation that waits for this lane fails with the reason."""
        if self._connection.is_for(epoch):
            failure = collective_error(error, f"opening {self}")
            if isinstance(failure, PeerLostError):
                self.world.find_out(self, failure)
            else:
                self.break_off(failure)

    def next_round(self) -> None:
        """Go on counting at the next round number: ranks that have made fewer calls then count alike."""
        with self._lock:
            self.sequence += ROUND - self.sequence % ROUND
            if self.compared is not None:
                self.compared.restart(self.sequence)

    def break_off(self, error: CollectiveError) -> None:
        """The lane cannot be used any more: fail what is in flight, refuse new calls."""
        with self._lock:
            if self.broken is None:
                self.broken = error
            queued, self._queue = list(self._queue), deque()
            if self._cut is not None:
                queued += [one for one in self._cut.held if isinstance(one, Job)]
                self._cut.held.clear()
            if self._active is not None:
                queued.append(self._active)
                self._active = None
        for job in queued:
            job.abandon()
            job.promise.settle(error)
        for operation in self.outstanding():
            operation.fail(error)
        self._connection.give_up()

    def needs(self, rank: int, made: int) -> bool:
        """Whether an operation in flight waits for ``rank``, which has left after its call ``made``."""
        if self._cut is not None and self._cut.verdict is None:
            return True
        index = self.group.ranks.index(rank)
        return any(
            operation.sequence > made if operation.sequence else operation.peer == index
            for operation in self.outstanding()
        )

    def explain_failure(self, operation: Operation, native: BaseException) -> CollectiveError:
        """The typed error for ``native``; the context says which rank is the culprit."""
        refusal = self._refusal_before(operation) if native is not self.broken else None
        if refusal is not None and not self._has_refused(operation, refusal, native):
            return refusal.error(self, operation.sequence)  # its peers have closed the communicator
        if self.broken is not None and not isinstance(native, CollectiveError):
            return self.broken.for_waiter()  # with which the communicator was given up
        error = collective_error(native, f"{operation.title} on {self}")
        if operation.peer >= 0 and isinstance(error, (CollectiveMismatchError, PeerRefusedError)):
            return self._of_message(operation, error)
        error = self.world.diagnose(self, error)
        if isinstance(error, PeerLostError) and not self._is_without(error.ranks):
            self.lose(error)
        return error

    def _has_refused(self, operation: Operation, refusal: Refusal, native: BaseException) -> bool:
        """Whether ``native`` is what this rank refused that very call with: it says more than the refusal."""
        own = refusal.rank == self.world.rank and refusal.place == operation.sequence
        return own and refusal.why == f"{type(native).__name__}: {native}"

    def _of_message(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """What a library says of a message, which knows neither the ranks of the world nor the line."""
        ranks = (self.group.ranks[operation.peer],) if isinstance(error, PeerRefusedError) else ()
        return type(error)(f"{operation}: {error}", ranks)

    def _is_without(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks are no members: of a message that cannot be connected without their store."""
        return bool(ranks) and set(ranks).isdisjoint(self.group.ranks)

    def _refusal_before(self, operation: Operation) -> Refusal | None:
        """The refusal with which ``operation`` was lost, if it was."""
        cut, settled = self._cut, self._settled
        if cut is not None and cut.verdict is None:
            refusal: Refusal | None = cut.refusal
        else:
            refusal = settled.refusal if settled is not None and settled.covers(operation.sequence) else None
        lost = refusal is not None and refusal.loses(operation.sequence, operation.part)
        return refusal if lost else None

    def lose(self, error: CollectiveError) -> None:
        """A rank is gone, or calls are out of step: give the lane up, and tell the ranks that wait for us."""
        self.break_off(error)
        self.world.pass_on(self)

    def of_gradients(self) -> Lane:
        """The lane of what backward sends for this one; gradients of gradients stay on it."""
        if self.name.endswith(BACKWARD):
            return self
        found: Lane = self.group.lane(self.name + BACKWARD)
        return found

    def estimate(self, name: str, size_bytes: int) -> Estimate:
        """The estimate of how long such an operation takes."""
        kind = (name, size_bytes.bit_length())
        known = self._estimates.get(kind)
        if known is None:
            known = self._estimates[kind] = Estimate(name, size_bytes)
        return known

    def outstanding(self) -> list[Operation]:
        """The operations that use their memory: collectives in order, then messages."""
        with self._lock:
            return self._out.using_memory()

    def disown(self, error: CollectiveError) -> list[Completion]:
        """In a forked child: refuse new calls, fail what is in flight. Returns what must not be destroyed."""
        self._lock = host.Lock()
        self.broken = error
        return [operation.disown(error) for operation in self._out]

    def wait_until_over(self) -> None:
        """Return when nothing is in flight, the lane is broken, or the context closes."""
        for operation in self.outstanding():
            self.world.watch_over(operation)  # a peer may be gone, or have refused its side
        pause = _FIRST_PAUSE_SECONDS
        while self.outstanding() and self.broken is None and not self.world.closed:
            host.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def close(self, *, abort: bool = False) -> None:
        """Close the communicators; with ``abort``, fail what is in flight and let nobody wait for it."""
        if abort:
            self.break_off(AbortedError(f"{self} was aborted"))
        else:
            self.broken = self.broken or AbortedError(f"{self} was closed; its name may be used anew")
        self._recorder.forget_lane(self.number)
        self._out.clear()
        self._connection.close(abort=abort)


def _gate(found: Objection) -> Promise | None:
    return found if isinstance(found, Promise) else None

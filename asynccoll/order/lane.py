"""A lane: one order of operations on one communicator of one group.

Every rank must issue the operations of a communicator in the same order. A lane keeps that order: an
operation is accepted when the function is called and issued at once if nothing is queued before it, else by
its ``queue``. A lane is put together of parts, each of one subject, which share its lock: each says which of
its methods are called with it held. It must not know what operations mean, nor which backend runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    collective_error,
)
from asynccoll.host import profiling
from asynccoll.host.call_site import Spot, called_at, caller
from asynccoll.modes.captured import as_called
from asynccoll.order.announcing import Announcing, Objection
from asynccoll.order.connection import Connection
from asynccoll.order.cut import Epochs, Refusal
from asynccoll.order.failing import Failing
from asynccoll.order.halting import Halting
from asynccoll.order.job import Job, Program, Start, What, returned
from asynccoll.order.operation import Estimate, Operation
from asynccoll.order.outstanding import Outstanding
from asynccoll.order.ownership import Owner, Owners, Stream
from asynccoll.order.places import Places
from asynccoll.order.programs import program_as_called
from asynccoll.order.queue import Queue
from asynccoll.order.records import Records
from asynccoll.order.stepping import Stepping, waiting
from asynccoll.order.turns import Turns
from asynccoll.transport.completion import Completion, Promise, Ready

if TYPE_CHECKING:
    from asynccoll.order.needs import Members, Subject, World
    from asynccoll.order.start_order import StartOrder
    from asynccoll.plan.cost import Cost
    from asynccoll.transport.communicator import Communicator

__all__ = ["BACKWARD", "DEFAULT", "Lane"]

DEFAULT = "default"
BACKWARD = "/backward"

#: How often a waiter for a lane to open asks whether all ranks are still alive.
_ASK_SECONDS = 0.5


class Lane:
    """The order named ``name`` of ``group``; operations on lanes of one name match across ranks."""

    def __init__(
        self,
        group: Members,
        world: World,
        name: str,
        key: str = "",
        start_order: StartOrder | None = None,
        child: int = 0,
    ) -> None:
        """``key``: by which its ranks meet; another one each time that a closed name is opened again.

        ``start_order``: what decides when it may start an operation; None where any order will do.
        ``child``: how many child tasks have ended that had it, one after the other.
        """
        self.group = group
        self.world = world
        self.name = name
        self.key: str = key or name
        #: each with those of the other ranks, before it is made
        self.compares_calls: bool = world.policy.check
        self.broken: CollectiveError | None = None
        self.refusals_seen = 0  # of how many it is known whether they are of this lane (``refusals``)
        self.routes: dict[object, Any] = {}  # plans, and estimates, by what a tensor looks like
        self.cost: Cost | None = None  # what its ranks have agreed on (``costs``)
        self.turns: Turns = Turns()
        self.records: Records = Records(world.recorder, group.key, self.key, name)
        self._estimates: dict[tuple[str, int], Estimate] = {}
        self._before: Callable[[], object] | None = None  # what is to be accepted before anything else is
        self._owners = Owners(checked=world.checks_order and not name.endswith(BACKWARD))
        self._out = Outstanding()
        lock = self._lock = host.Lock()
        self._places = Places(child)
        epochs = self._epochs = Epochs(self._places)
        failing = self._failing = Failing(self, epochs)
        made, failed = lambda: self.queue.drive(), self._failed_to_open  # noqa: PLW0108  # it comes later
        connection = self._connection = Connection(name, lock, partial(world.open, self), made, failed)
        self.announcing: Announcing = Announcing(connection, checked=self.compares_calls)
        self.queue: Queue = Queue(
            name, self.key, lock, connection, epochs, self.announcing, self.records, failing, start_order
        )
        self.halting: Halting = Halting(
            self, lock, epochs, self.queue, self._out, self.records, self._restart
        )

    def __str__(self) -> str:
        where = "the world" if self.group.is_world else f"ranks {list(self.group.ranks)}"
        return f"lane {self.name!r} of {where}"

    @property
    def kin(self) -> str:
        """The key of all lanes that its child tasks have had, in whichever group, and in backward passes."""
        return self.name.removesuffix(BACKWARD) + self.key.removeprefix(self.name)

    @property
    def communicator(self) -> Communicator | None:
        """On which its operations are issued now; None until it is open."""
        return self._connection.communicator

    @property
    def has_opened(self) -> bool:
        """Whether all members have it open, as far as that is waited for; or have had it."""
        return self._connection.has_opened

    @property
    def sequence(self) -> int:
        """The place of the latest collective that was accepted, or refused."""
        return self._places.latest

    @property
    def epoch(self) -> int:
        """How often its ranks have come in step again after a refusal."""
        return self._epochs.number

    @property
    def sent_together(self) -> str:
        """What the call that is being made now is sent together with; "" in the normal case."""
        whole = self._places.whole
        return whole if isinstance(whole, str) else ""

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
        program: Job | None = None,
    ) -> Operation:
        """Accept an operation of one native call; issued before this returns if nothing is queued.

        ``estimate`` says which operation it is, and how long the likes of it take. ``stream`` names an
        order of its own within the lane (point-to-point messages of one peer and tag), which does not
        queue behind other streams. ``what`` is what has to be the same on all ranks; ``of``, what it is of,
        for the record; ``called``, when the user called it, if not now; ``program``, what ``start`` begins.
        """
        spot = caller()
        line = called_at.get() or spot
        called = host.monotonic() if called is None else called
        what = what or estimate.name
        if self._before is not None:
            self._accept_before()
        found: Objection = None
        completion: Completion | None = None
        places = self._places
        with self._lock:
            self._admitted_owner(stream).spot = spot
            if (program is None or program.driven) and self.queue.is_free(stream):
                # First of all the start: what is noted down afterwards costs no latency.
                try:
                    found = None if stream else self.announcing.call(line, *places.next(what))
                    completion = self._made_unless(found, start)
                except BaseException as error:  # refused by the library, which may have sent something
                    self._failing.not_taken(error, estimate.name, message=stream is not None)
                    raise
            if completion is not None:
                ends, job = completion, program
            else:
                self._connection.open(waits=self.world.open_waits)
                job = program or Job(as_called(start), None)
                ends = job.promise
            sequence = 0 if stream else places.take()  # messages have no place in the order
            limit = self.world.timeout if timeout is None else timeout
            operation = Operation(self, estimate, sequence, ends, line, limit, called)
            if stream is None:
                operation.part = places.part
                self._out.add(operation)
            else:
                _, operation.peer, operation.tag = stream
                self._out.add_apart(operation)
            self.records.note(operation, line, size_bytes, of, queued=completion is None)
            if job is not None:
                self._accept(job, operation, line, what, found, begun=completion is not None)
        if job is not None or found is not None:
            self._go_on(operation, completion, found)
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
        """Accept an operation of several native calls; ``what``, ``of`` and ``called`` are as for ``issue``.

        ``awaited_soon``: its waiter is likely to come at once, and may then drive it (``stepping``).
        ``sent``: what the program has started so far, and does not wait for before it goes on.
        """
        drive = self.queue.drive if awaited_soon or waiting.get() else None
        job = Job(None, program_as_called(program), driven_by=drive, sent=sent)
        estimate, begin = self.estimate(name, size_bytes), partial(self.queue.begin, job)
        return self.issue(estimate, begin, size_bytes, timeout, None, of, what, called, job)

    def _made_unless(self, found: Objection, start: Start) -> Completion | None:
        """Make the call, if nothing is found against it; None if that is not known yet.

        With the lock held, as what follows.
        """
        if found is None:
            return returned(start(self._connection.opened()))
        return Ready(found) if isinstance(found, CollectiveMismatchError) else None

    def _admitted_owner(self, stream: Stream | None) -> Owner:
        """Check that the caller may issue here now; it owns this order from now on."""
        if self.broken is not None:
            raise self.broken.for_waiter()
        return self._owners.admit(stream, self)

    def _accept(
        self, job: Job, operation: Operation, line: Spot, what: What, found: Objection, *, begun: bool
    ) -> None:
        """``operation`` ends with ``job``, which is queued if it is not ``begun``."""
        job.becomes(operation, line, self._places.named(what), shares=self._places.shared)
        if begun:
            return
        job.driven = False
        job.gate = found if isinstance(found, Promise) else None
        taken = self._epochs.takes(job)
        if isinstance(taken, Refusal):
            operation.fail(taken.error(self, job.place, operation))
        elif taken:
            self.queue.extend((job,))

    def _go_on(self, operation: Operation, completion: Completion | None, found: Objection) -> None:
        """Do what is left to do without the lock for an operation that was not simply issued."""
        if completion is None:
            self.queue.start()
        elif isinstance(found, CollectiveMismatchError):
            self._failing.differs(found, operation.sequence, operation.part, completion)
        elif isinstance(completion, Stepping):
            completion.offer()

    def _show(self, operation: Operation, size_bytes: int) -> None:
        """Tell the observers. Without the lock, which an observer of a program's end takes itself."""
        for observe in self.world.observers:
            observe(operation, size_bytes)
        if profiler._is_profiler_enabled:
            operation.add_waker(profiling.begin(f"asynccoll.{operation.name} [{self.name}]"))

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

        ``name``: of that call. ``what`` has to be the same on all ranks, of each part accepted inside.
        With ``place``, where the latest call took that one, it goes on with that call: raises what became of
        it, ``PeerRefusedError`` or ``CollectiveMismatchError``, if it was refused meanwhile. If the block
        fails its place is refused, whatever of it was issued. Inside another such block it is a part of that.
        """
        places = self._places
        with self._lock:
            self._admitted_owner(None)
            inner = places.shared
            if not inner and (place is None or place != places.latest):
                places.open()
            elif not inner and (refusal := self._epochs.refusal_at(places.latest)) is not None:
                raise refusal.error(self, places.latest)
            before = places.share(what)
            place = places.latest
        try:
            try:
                yield place
            finally:
                places.leave(before)
        except BaseException as error:
            if not inner:
                self.world.refuse(self, error, place, name=name)
            raise

    def end_of_parts(self, place: int) -> None:
        """The call at ``place``, made in parts, has no more of them: for peers that wait for another."""
        with self._lock:
            lost = self.halting.is_halted or self._epochs.refusal_at(place) is not None
            if place == self.sequence and not lost:
                self.records.ended(place, self._places.part + 1)

    def follow_up(self, operation: Operation, name: str, completion: Completion) -> Operation:
        """What follows on ``operation`` once it is done: an operation with its place and its time limit."""
        with self._lock:
            if self.broken is not None:
                raise self.broken.for_waiter()
            estimate = self.estimate(f"{name} of {operation.name}", 0)
            follower = operation.followed_by(estimate, completion)
            self._out.add_apart(follower)
            return follower

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

    def _failed_to_open(self, error: BaseException) -> None:
        """A helper thread could not: every operation that waits for this lane fails with the reason."""
        failure = collective_error(error, f"opening {self}")
        if isinstance(failure, PeerLostError):
            self.world.find_out(self, failure)
        else:
            self.break_off(failure)

    def _restart(self, in_step: bool) -> Callable[[], object] | None:
        """All begin another epoch. With the lock held; what comes back is to be done without it."""
        self.announcing.restart(self.epoch)
        if in_step:
            return None
        self.cost = None  # it is unknown whether all had agreed on it
        # There are half-matched operations on this one.
        retired = self._connection.replace(self.epoch, waits=self.world.open_waits)
        return None if retired is None else partial(self._connection.retire, retired)

    def next_child(self, error: BaseException | None) -> None:
        """A child task has ended that had it: what is called from now on is another's.

        With ``error`` it has not made all of its calls, and what is left of them is refused.
        """
        with self._lock:
            missed = self._places.next_child()
            until = self._places.latest
        if error is not None:
            self.world.refuse(self, error, missed, until=until)

    def next_round(self) -> None:
        """Go on counting at the next round number: ranks that have made fewer calls then count alike."""
        with self._lock:
            self.announcing.restart(self._places.next_round())

    def break_off(self, error: CollectiveError) -> None:
        """The lane cannot be used any more: fail what is in flight, refuse new calls."""
        with self._lock:
            if self.broken is None:
                self.broken = error
            self._connection.give_up()
            jobs = [*self.queue.clear(), *self._epochs.end()]
        for job in jobs:
            job.abandon()
            job.promise.settle(error)
        for operation in self.outstanding():
            operation.fail(error)

    def lose(self, error: CollectiveError) -> None:
        """A rank is gone, or calls are out of step: give the lane up, and tell the ranks that wait for us."""
        self.break_off(error)
        self.world.pass_on(self)

    def explain_failure(self, operation: Operation, native: BaseException) -> AsyncCollError:
        """The typed error for ``native``, with its culprit named (``Failing.explain``)."""
        return self._failing.explain(operation, native)

    def needs(self, rank: int, made: int) -> bool:
        """Whether an operation in flight waits for ``rank``, which has left after its call ``made``."""
        index = self.group.ranks.index(rank)
        return self._epochs.unsettled is not None or any(
            operation.sequence > made if operation.sequence else operation.peer == index
            for operation in self.outstanding()
        )

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

    def is_over(self, place: int) -> bool:
        """Whether all calls up to that place are over here. With the lock held."""
        first = next(iter(self._out.collectives), None)
        return first is None or first.sequence > place

    def disown(self, error: CollectiveError) -> list[Completion]:
        """In a forked child: refuse new calls, fail what is in flight. Returns what must not be destroyed."""
        self._lock = self._connection.lock = self.queue.lock = self.halting.lock = host.Lock()
        self.broken = error
        self._epochs.end()
        return [operation.disown(error) for operation in self._out]

    def close(self, *, abort: bool = False) -> None:
        """Close the communicators; with ``abort``, fail what is in flight and let nobody wait for it."""
        if abort:
            self.break_off(AbortedError(f"{self} was aborted"))
        else:
            self.broken = self.broken or AbortedError(f"{self} was closed; its name may be used anew")
            self._epochs.end()
        self.records.forget()
        self._out.clear()
        self._connection.close(abort=abort)

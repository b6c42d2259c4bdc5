"""A lane: one order of operations on one communicator of one group.

Every rank must issue the operations of a communicator in the same order. A lane keeps that order: an
operation is accepted when the user calls the function. It is issued immediately if nothing is queued before
it, else later by the lane's ``queue``. A lane is made of objects that each have one responsibility and share
the lane's lock; each documents which of its methods must be called with the lock held. ``cut`` defines place,
part, epoch and refusal. This module must not know what operations mean or which backend runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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
from asynccoll.host.call_number import ROUND
from asynccoll.host.call_site import Spot, site
from asynccoll.host.words import enumerated
from asynccoll.modes.captured import as_called
from asynccoll.order.announcing import Announcing, Objection
from asynccoll.order.connection import Connection
from asynccoll.order.cut import Epochs, Refusal
from asynccoll.order.failing import Failing
from asynccoll.order.halting import Halting
from asynccoll.order.job import Job, Program, Start, What, program_as_called, returned
from asynccoll.order.needs import Members, Subject, World
from asynccoll.order.operation import Estimate, Operation
from asynccoll.order.outstanding import Outstanding
from asynccoll.order.ownership import Owner, Owners, Stream
from asynccoll.order.places import Places
from asynccoll.order.queue import Queue
from asynccoll.order.records import Records
from asynccoll.order.start_order import StartOrder
from asynccoll.order.stepping import Stepping, waiting
from asynccoll.order.turns import Turns
from asynccoll.plan.spec import Cost
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Ready

DEFAULT = "default"
BACKWARD = "/backward"

#: How often ``open`` checks, while it waits, whether all ranks are still alive.
_ASK_SECONDS = 0.5


class Lane:
    """An order of operations called ``name`` among the ranks of ``group``.

    Operations on lanes of the same name and group match across ranks.
    """

    def __init__(
        self,
        group: Members,
        world: World,
        name: str,
        key: str = "",
        start_order: StartOrder | None = None,
        child: int = 0,
        rounds: int = 0,
    ) -> None:
        """``key``: the name under which the ranks open the lane; new each time a closed lane is reopened.

        ``start_order`` decides when the lane may start an operation; None if its operations may start in any
        order relative to those of other lanes. ``child``: how many child tasks that had this lane have ended
        so far; ``rounds``: how often the ranks have joined.
        """
        self.group = group
        self.world = world
        self.name = name
        self.key: str = key or name
        #: whether each call is compared with the other ranks' calls before it is made
        self.compares_calls: bool = world.policy.check
        self.broken: CollectiveError | None = None
        self.refusals_seen = 0  # the world's count of refusals when this lane last looked (``refusals``)
        self.routes: dict[object, Any] = {}  # plans and estimates, by kind of tensor
        self.cost: Cost | None = None  # the cost model agreed on by its ranks (``costs``)
        self.records: Records = Records(world.recorder, group.key, self.key, name)
        self._estimates: dict[tuple[str, int], Estimate] = {}
        self._before: Callable[[], object] | None = None  # called before the next call is accepted
        self._owners = Owners(checked=world.checks_order and not name.endswith(BACKWARD))
        self._out = Outstanding()
        lock = self._lock = host.Lock()
        self._places = Places(child, rounds)
        epochs = self._epochs = Epochs(self._places)
        failing = self._failing = Failing(self, epochs)
        self.turns: Turns = Turns(failing.lose_messages)
        made, failed = lambda: self.queue.drive(), self._failed_to_open  # noqa: PLW0108  # set below
        connection = self._connection = Connection(name, lock, partial(world.open, self), made, failed)
        self.announcing: Announcing = Announcing(connection, rounds * ROUND, checked=self.compares_calls)
        self.queue: Queue = Queue(
            name, self.key, lock, connection, epochs, self.announcing, self.records, failing, start_order
        )
        self.halting: Halting = Halting(
            self, lock, epochs, self.queue, self._out, self.records, self._restart
        )

    def __str__(self) -> str:
        where = "the world" if self.group.is_world else f"ranks [{enumerated(self.group.ranks)}]"
        return f"lane {self.name!r} of {where}"

    @property
    def kin(self) -> str:
        """``key`` without the backward suffix: the same for all of a child task's lanes, in every group."""
        return self.name.removesuffix(BACKWARD) + self.key.removeprefix(self.name)

    @property
    def communicator(self) -> Communicator | None:
        """The communicator on which operations are issued now; None until it is open."""
        return self._connection.communicator

    @property
    def has_opened(self) -> bool:
        """Whether the first communicator has been opened, or the lane has given up opening it."""
        return self._connection.has_opened

    @property
    def sequence(self) -> int:
        """The place of the latest collective that was accepted or refused here."""
        return self._places.latest

    @property
    def epoch(self) -> int:
        """The number of the current epoch (``cut``), from 0."""
        return self._epochs.number

    def upcoming(self, what: What) -> tuple[What, int, int, bool]:
        """Describe the next operation if it is ``what``: see ``Places.next``."""
        return self._places.next(what)

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
        """Accept an operation of one native call, and issue it before returning if nothing is queued.

        ``estimate`` has the operation's name and how long such operations take. ``stream`` names a separate
        order within the lane (the point-to-point messages of one peer and tag), which does not queue behind
        other streams. ``what`` describes the call and must be the same on all ranks; ``of`` describes its
        data for the flight recorder; ``called`` is the time of the user's call, if not now; ``program`` is
        the program that ``start`` begins, if it begins one.
        """
        line = site()
        called = host.monotonic() if called is None else called
        what = what or estimate.name
        if stream is None and self._before is not None:  # a message is no part of a block, and sends none
            self._accept_before()
        found: Objection = None
        completion: Completion | None = None
        places = self._places
        with self._lock:
            self._admitted_owner(stream).spot = line
            direct = (program is None or program.driven) and self.queue.is_free(stream)
            upcoming = _, place, part, _ = places.next(what)
            if not direct:
                self._connection.open(waits=self.world.backend.open_waits)
            # Recorded before the native call, since that may block or end the process.
            ticket = self.records.note(
                estimate, line, size_bytes, of, place, part, stream, called, begun=direct
            )
            if direct:
                try:
                    found = None if stream else self.announcing.call(line, *upcoming)
                    completion = self._made_unless(found, start)
                except BaseException as error:  # from the backend, which may already have sent something
                    self.records.withdraw(ticket, places.latest, message=stream is not None)
                    self._failing.not_taken(error, estimate.name, message=stream is not None)
                    raise
            if completion is not None:
                ends, job = completion, program
            else:
                self.records.held(ticket)
                job = program or Job(as_called(start), None)
                ends = job.promise
            sequence = 0 if stream else places.take()  # messages have no place in the order
            limit = self.world.timeout if timeout is None else timeout
            operation = Operation(self, estimate, sequence, ends, line, limit, called, ticket)
            if stream is None:
                operation.part = places.part
                self._out.add(operation)
            else:
                _, operation.peer, operation.tag = stream
                self._out.add_apart(operation)
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

        ``awaited_soon``: a waiter is likely to wait for it immediately, and may then drive it (``stepping``).
        ``sent`` returns the completions of native calls that the program has started and does not wait for.
        """
        drive = self.queue.drive if awaited_soon or waiting.get() else None
        job = Job(None, program_as_called(program), driven_by=drive, sent=sent)
        estimate, begin = self.estimate(name, size_bytes), partial(self.queue.begin, job)
        return self.issue(estimate, begin, size_bytes, timeout, None, of, what, called, job)

    def _made_unless(self, found: Objection, start: Start) -> Completion | None:
        """Make the call, unless ``found`` objects to it. Returns the completion, or None if still undecided.

        A mismatch is returned as a completion that has failed. This method, ``_admitted_owner`` and
        ``_accept`` are called with the lock held.
        """
        if found is None:
            return returned(start(self._connection.opened()))
        return Ready(found) if isinstance(found, CollectiveMismatchError) else None

    def admit(self) -> None:
        """Raise the error of a collective that this lane would not accept from the caller now, if any."""
        with self._lock:
            self._admitted_owner(None)

    def _admitted_owner(self, stream: Stream | None) -> Owner:
        """Check that the caller may issue here now, and make it the owner of this order (``ownership``)."""
        if self.broken is not None:
            raise self.broken.for_waiter()
        return self._owners.admit(stream, self)

    def _accept(
        self, job: Job, operation: Operation, line: Spot, what: What, found: Objection, *, begun: bool
    ) -> None:
        """Tie ``operation`` to ``job``; unless ``begun``, queue the job, or hold or fail it (``cut``)."""
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
        """Complete the acceptance of an operation that was not simply issued. Called without the lock."""
        if completion is None:
            self.queue.start()
        elif isinstance(found, CollectiveMismatchError):
            self._failing.differs(found, operation.sequence, operation.part, completion)
        elif isinstance(completion, Stepping):
            completion.offer()

    def _show(self, operation: Operation, size_bytes: int) -> None:
        """Call the observers, without the lock: one that observes the end of a program takes it itself."""
        for observe in self.world.observers:
            observe(operation, size_bytes)
        if profiler._is_profiler_enabled:
            operation.add_waker(profiling.begin(f"asynccoll.{operation.name} [{self.name}]"))

    @contextmanager
    def after(self, before: Callable[[], object]) -> Iterator[None]:
        """Call ``before`` just before the first call in the block is accepted; not if all are refused."""
        self._before = before
        try:
            yield
        finally:
            self._before = None

    def _accept_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:  # else another thread has called it
            before()

    @contextmanager
    def together(self, place: int | None = None, what: What = None, name: str = "") -> Iterator[int]:
        """Accept the operations inside the block as parts of one call (a tree). Yields that call's place.

        ``name`` is the call's name. ``what`` describes it, and must be the same on all ranks for each part.
        If the latest call took ``place``, the block adds parts to that call; it raises that call's
        ``PeerRefusedError`` or ``CollectiveMismatchError`` if the call has been refused since. If the block
        fails, the rest of its call is refused, whichever parts were issued. A nested block adds parts to the
        outer block's call.
        """
        places = self._places
        before: tuple[bool, What] | None = None
        try:
            try:
                with self._lock:
                    self._admitted_owner(None)
                    adds = places.shared or place == places.latest
                    refusal = self._epochs.refusal_at(places.latest) if adds else None
                    if refusal is not None and not places.shared:
                        raise refusal.error(self, places.latest)
                    # Without a call, so that Ctrl-C comes before all of this or after it.
                    before = places.shared, places.whole
                    place = places.latest = places.latest + (not adds)
                    places.part = places.part if adds else 0
                    places.shared, places.whole = True, what or places.whole
                yield place
            finally:
                if before is not None:  # also where Ctrl-C comes as the lock is released
                    places.shared, places.whole = before
        except BaseException as error:
            if before is not None and not before[0]:
                self.world.refuse(self, error, place, name=name)
            raise

    def end_of_parts(self, place: int) -> None:
        """Record that the call at ``place`` has no further parts, for peers that wait for another part."""
        with self._lock:
            lost = self.halting.is_halted or self._epochs.refusal_at(place) is not None
            if place == self.sequence and not lost:
                self.records.ended(place, self._places.part + 1)

    def follow_up(self, operation: Operation, name: str, completion: Completion) -> Operation:
        """Accept an operation that follows ``operation``, with the same place and deadline."""
        with self._lock:
            if self.broken is not None:
                raise self.broken.for_waiter()
            estimate = self.estimate(f"{name} of {operation.name}", 0)
            follower = operation.followed_by(estimate, completion)
            self._out.add_apart(follower)
            return follower

    # Opening, breaking, closing

    def open(self) -> None:
        """Open the communicator and wait until it is open.

        Raises:
            PeerLostError: a rank was lost while this one waited.
        """
        with self._lock:
            self._connection.open(waits=self.world.backend.open_waits)
        while not self._connection.wait(_ASK_SECONDS):
            lost = self.world.loss(self)
            if lost is not None:
                self.break_off(lost)
        if self.broken is not None:
            self._connection.join()
            raise self.broken.for_waiter()

    def _failed_to_open(self, error: BaseException) -> None:
        """Break the lane off after a helper thread failed to open the communicator."""
        failure = collective_error(error, f"opening {self}")
        if not (isinstance(failure, PeerLostError) and self.world.find_out(self, failure)):
            self.break_off(failure)

    def _restart(self, in_step: bool) -> Callable[[], bool] | None:
        """Begin the next epoch, on another communicator unless ``in_step``. Called with the lock held.

        Returns a function to be called after the lock is released, or None. The function returns whether the
        operations in flight on the old communicator will end.
        """
        self.announcing.restart(self.epoch)
        if in_step:
            return None
        self.cost = None  # it is unknown whether all ranks had agreed on it
        # The old communicator has operations that only some ranks have issued.
        retired = self._connection.replace(self.epoch, waits=self.world.backend.open_waits)
        return None if retired is None else partial(self._connection.retire, retired)

    def next_child(self, error: BaseException | None) -> None:
        """Note that a child task that used this lane has ended: later calls are those of the next child.

        With ``error``, the child ended before it had made all of its calls, and the rest are refused.
        """
        with self._lock:
            missed = self._places.next_child()
            until = self._places.latest
        if error is not None:
            self.world.refuse(self, error, missed, until=until)

    def next_round(self) -> None:
        """Continue counting at the next multiple of ``ROUND``, as do ranks that have made fewer calls."""
        with self._lock:
            self._places.next_round()

    def begin_round(self, rounds: int) -> None:
        """Restart the comparison of calls for round ``rounds``, once all calls of the last round are made."""
        with self._lock:
            self.announcing.restart(rounds * ROUND)

    def break_off(self, error: CollectiveError) -> None:
        """Make the lane unusable: fail the operations in flight and queued, and refuse new calls."""
        with self._lock:
            if self.broken is None:
                self.broken = error
            self._connection.give_up()
            queued = self.queue.clear()
            jobs = [*queued, *self._epochs.end(queued, blamed=isinstance(self.broken, PeerLostError))]
        ends = [*(job.fail for job in jobs), *(operation.fail for operation in self.outstanding())]
        # If this lane has the turn to start, ``drive`` passes it on to other lanes.
        host.call_each([*(partial(end, error) for end in ends), self.queue.drive])

    def lose(self, error: CollectiveError) -> None:
        """Break the lane off (a rank is gone, or calls are out of step), and tell the ranks that wait."""
        self.break_off(error)
        self.world.pass_on(self)

    def explain_failure(self, operation: Operation, native: BaseException) -> AsyncCollError:
        """Return the typed error for ``native``, with its culprit named (``Failing.explain``)."""
        return self._failing.explain(operation, native)

    def needs(self, rank: int, made: int) -> bool:
        """Whether an operation or unsettled refusal still needs ``rank``, which left after call ``made``."""
        index = self.group.ranks.index(rank)
        return self._epochs.unsettled is not None or any(
            operation.sequence > made
            if operation.sequence
            # That rank may have received it since the progress thread last polled.
            else operation.peer == index and not operation.completion.poll()
            for operation in self.outstanding()
        )

    def of_gradients(self) -> Lane:
        """Return the lane that backward passes use for this lane; this lane itself if it is one of those."""
        if self.name.endswith(BACKWARD):
            return self
        found: Lane = self.group.lane(self.name + BACKWARD)
        return found

    def estimate(self, name: str, size_bytes: int) -> Estimate:
        """Return the running estimate for operations of this name whose size has the same number of bits."""
        kind = (name, size_bytes.bit_length())
        known = self._estimates.get(kind)
        if known is None:
            known = self._estimates[kind] = Estimate(name, size_bytes)
        return known

    def outstanding(self) -> list[Operation]:
        """Return the operations whose memory is still in use: collectives in order, then the others."""
        with self._lock:
            return self._out.using_memory()

    def is_over(self, place: int) -> bool:
        """Whether no operation up to ``place`` is in flight here. Called with the lock held."""
        first = next(iter(self._out.collectives), None)
        return first is None or first.sequence > place

    def disown(self, error: CollectiveError) -> list[Completion]:
        """In a forked child, refuse new calls with ``error``, and fail the operations in flight.

        Returns their native completions, which the child must not destroy.
        """
        self._lock = self._connection.lock = self.queue.lock = self.halting.lock = host.Lock()
        self.broken = error
        self._epochs.end()
        return [operation.disown(error) for operation in self._out]

    def close(self, *, abort: bool = False) -> None:
        """Fail operations in flight (none, unless ``abort`` or another thread calls), and close the lane."""
        why = "was aborted" if abort else "was closed; its name may be reused"
        # A peer may have made the refused call, and even completed it: it need not have heard of the refusal.
        in_step = self._epochs.unsettled is None and self.broken is None
        steps: list[Callable[[], object]] = [
            partial(self.break_off, AbortedError(f"{self} {why}")),
            self.records.forget,
            self._out.clear,
            partial(self._connection.close, abort=abort, in_step=in_step),
        ]
        host.call_each(steps)

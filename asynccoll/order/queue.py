"""The queued calls of a lane, which are issued in order, by one thread at a time.

A *program* (an operation of several native calls that depend on each other) is driven by the callbacks of its
completions, or by its waiter if that waits immediately (``stepping``); so it makes progress even without a
waiter. Later calls are queued until the program has issued its last call.

This module must not know which ranks are told about a failed call, or how a refusal is settled (``cut``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from asynccoll import host
from asynccoll.modes.unseen import with_data
from asynccoll.order.announcing import Announcing
from asynccoll.order.connection import Connection
from asynccoll.order.cut import Epochs, Refusal
from asynccoll.order.failing import Failing
from asynccoll.order.job import Job, returned
from asynccoll.order.ownership import Stream
from asynccoll.order.records import Records
from asynccoll.order.start_order import StartOrder
from asynccoll.order.stepping import Stepping
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Ready
from asynccoll.transport.streams import on_stream

#: What a KeyboardInterrupt says that came in the middle of a step, whose program cannot go on after it.
_CUT_OFF = (
    "Ctrl-C came while a step of the call ran, and no step can run twice: the call fails here, and on ranks "
    "that wait for it"
)


class Queue:
    """The queue of one lane, and the code that issues calls from it.

    The methods above ``start`` are called with the lane's lock held; ``start`` and the methods below it
    without the lock, except ``_rest``, ``_may_start`` and ``_give_back``.
    """

    def __init__(
        self,
        name: str,
        key: str,
        lock: host.Lock,
        connection: Connection,
        epochs: Epochs,
        announcing: Announcing,
        records: Records,
        failing: Failing,
        start_order: StartOrder | None,
    ) -> None:
        """``name`` and ``key`` are the lane's: ``start_order`` uses them to identify it to other ranks."""
        self.name: str = name
        self.key: str = key
        self.lock: host.Lock = lock
        self._connection = connection
        self._epochs = epochs
        self._announcing = announcing
        self._records = records
        self._failing = failing
        self._jobs: deque[Job] = deque()
        self._active: Job | None = None
        self._start_order = start_order
        self._admitted: int | None = None  # the epoch in which ``start_order`` lets one operation start
        self._turn: Promise | None = None  # the latest turn that ``start_order`` has given to this lane
        self._ended: tuple[Job, Promise, Completion] | None = None  # see ``_end``
        self._given_back: Promise | None = None  # the turn to be settled: after Ctrl-C, by the next driver
        self._driver: int | None = None  # a thread is in ``drive``
        self._kicked = False  # ``drive`` was called since: that thread must look again before it returns

    def is_free(self, stream: Stream | None) -> bool:
        """Whether the caller may directly issue the next call, or the next message of ``stream``."""
        return (
            self._connection.communicator is not None
            and not self._jobs
            and self._active is None
            and self._driver is None
            and self._start_order is None
            and self._epochs.cut is None
            and not self._failing.out_of_step
            and not (self._epochs.places.shared and self._epochs.has_given_up)
        ) or (stream is not None and self._only_awaits_others())

    def _only_awaits_others(self) -> bool:
        """Whether all queued calls wait for a collective that is being compared with other ranks' calls.

        A message must not wait for the comparison: its receiver may need the message before it makes its own
        call.
        """
        first = self._active or (self._jobs[0] if self._jobs else None)
        return (
            first is not None
            and first.gate is not None
            and self._connection.communicator is not None
            and self._epochs.cut is None
            and not self._failing.out_of_step
            and all(job.place for job in self._jobs)
        )

    def begin(self, job: Job, _: Communicator) -> Completion:
        """Issue the first call of a program that its waiter may drive, while nothing else is queued."""
        promise, self._active = job.promise, job
        try:
            last = self._next_call(job)
        except BaseException:  # from the native call itself: ``Lane.issue`` handles it, as for a single call
            self._active = None
            raise
        if last is not None:
            self._active = None
            promise.follow(last)
        return promise

    def extend(self, jobs: Iterable[Job]) -> None:
        """Queue ``jobs`` behind those that are already queued."""
        self._jobs.extend(jobs)

    def take_out(self, refusal: Refusal, last: int) -> list[Job]:
        """Remove the jobs that ``refusal`` loses from the queue, and return them.

        The job that has begun is abandoned instead if ``refusal`` loses it and its place is at most ``last``.
        """
        lost = [job for job in self._jobs if refusal.loses(job.place, job.part)]
        self._jobs = deque(job for job in self._jobs if not refusal.loses(job.place, job.part))
        self.give_up(refusal, last)
        return lost

    def give_up(self, refusal: Refusal, last: int) -> None:
        """Abandon the job that has begun, if ``refusal`` loses it and its place is at most ``last``."""
        active = self._active
        if active is not None and active.place <= last and refusal.loses(active.place, active.part):
            self._active = None
            active.abandon()

    def clear(self) -> list[Job]:
        """Empty the queue. Returns all jobs, including the one that has begun."""
        jobs = [*self._jobs] if self._active is None else [*self._jobs, self._active]
        self._jobs, self._active = deque(), None
        return jobs

    def reached(self, latest: int) -> int:
        """Return the highest place that may have been issued so far; ``latest`` is the last one accepted."""
        first = next((job for job in self._jobs if job.place), None)
        # A queued call that was announced to other ranks counts as issued: it is not announced again.
        return latest if first is None else first.place - (not first.shares and first.gate is None)

    def is_quiet_below(self, refusal: Refusal) -> bool:
        """Whether no call that ``refusal`` leaves valid is queued or being issued."""
        active = self._active
        return (
            self._driver is None
            and (active is None or not active.place or refusal.loses(active.place, active.part))
            and not any(job.place for job in self._jobs)
        )

    def start(self) -> None:
        """Issue the call just queued, if possible; let completions drive a program that is ahead of it."""
        try:
            # With the lock: else the job may be about to issue its first call, with nothing to hand over yet.
            with self.lock:
                active = self._active
                promise = None if active is None else active.promise  # read once: the job may end any moment
            if isinstance(promise, Stepping):
                promise.hand_over()  # completions drive it from here: the queued call waits for its end too
            self.request(1)
        except BaseException:
            self.request(1)  # one too many does no harm
            raise
        finally:
            self.drive()

    def drive(self) -> None:
        """Issue as many queued operations as possible, or make the thread that is already driving do so."""
        me, mine = host.get_ident(), False
        try:
            with self.lock:
                if self._driver is not None:
                    self._kicked = True
                    return
                self._driver, mine = me, True
            self._issue_queued()
        except BaseException:  # Ctrl-C while a waiter drives; it may even strike as the lock is released
            if mine:
                self._stop_driving(me)
            raise

    def _stop_driving(self, me: int) -> None:
        """Leave the remaining work to completions, after the driving waiter was interrupted at any point."""
        with self.lock:
            if self._driver not in (None, me):
                return  # this thread had stopped before the interrupt, and another one drives now
            self._driver, self._kicked = None, False
            active = self._active
            if active is not None and self._jobs and self._jobs[0] is active:
                self._jobs.popleft()  # the interrupt came before that
        if active is None or active.step is None:
            self.drive()
        else:
            active.driven = False
            active.step.add_callback(self.drive)

    def _issue_queued(self) -> None:
        self._end()
        while True:
            job = self._active
            if job is None:
                with self.lock:
                    if self._jobs and self._may_start(self._jobs[0]):
                        job = self._jobs[0]
                        self._epochs.issued = job.place or self._epochs.issued
                        self._records.begun(job.ticket)
                        self._active = job
                        self._jobs.popleft()  # last: an interrupt as it returns must not lose the job
                    elif self._rest():
                        break
            elif job.step is not None and not job.step.done():
                with self.lock:
                    if self._rest():
                        break
            if job is not None and (job.step is None or job.step.done()):
                self._advance(job)
        if self._admitted is not None:
            self._pass_turn()

    def _may_start(self, job: Job) -> bool:
        if self._connection.communicator is None or self._failing.out_of_step:
            return False
        return self._start_order is None or not job.place or self._admitted == self._epochs.number

    def _rest(self) -> bool:
        """Stop driving unless ``drive`` was called since. Returns whether it stopped. With the lock held."""
        if self._kicked:
            self._kicked = False
            return False
        self._driver = None
        return True

    def _advance(self, job: Job) -> None:
        """Start the job's next call; after its last call the lane is free for the next job."""
        interrupted: KeyboardInterrupt | None = None
        promise = job.promise  # here, as the job may be given up meanwhile
        try:
            last = self._next_unless_refused(job)
        except BaseException as error:  # raised in the job's waiter, not in this thread
            last = Ready(error)
            if isinstance(error, KeyboardInterrupt):  # except that an interrupt is raised here as well
                interrupted = error
                error.args = error.args or (_CUT_OFF,)
            if self._active is job:
                self._failing.broke_off(job, error)
        if last is not None:
            self._ended = job, promise, last
            self._end()
        elif not job.driven:
            assert job.step is not None
            job.step.add_callback(self.drive)
        if interrupted is not None:
            raise interrupted

    def _end(self) -> None:
        """Free the lane after a job's last call, hand its completion over, and give the turn back.

        ``_ended`` has the job, its promise, and its completion, to which nothing else refers. After an
        interrupt at any point, the next thread that drives does what remains.
        """
        if self._ended is not None:
            job, promise, last = self._ended
            with self.lock:
                if self._active is job:  # else the job was given up: ``_pass_turn`` gives the turn back
                    if job.place:
                        self._give_back()
                    self._active = None
            promise.follow(last)
            self._ended = None
        self._pass_on()

    def _give_back(self) -> None:
        """Use up the turn that this lane has, if any; ``_pass_on`` then settles it. With the lock held."""
        if self._admitted is not None:
            self._admitted, self._given_back = None, self._turn

    def _pass_on(self) -> None:
        """Have another lane start an operation, if this one has given its turn back. Without the lock."""
        turn = self._given_back
        if turn is not None:
            turn.settle()
            if self._given_back is turn:
                self._given_back = None

    def _next_unless_refused(self, job: Job) -> Completion | None:
        """Call ``_next_call`` unless the comparison of calls objects. Also None if that is still unknown."""
        found = self._announcing.objection(job)
        if found is None:
            return on_stream(job.stream, with_data, self._next_call, job)
        if isinstance(found, Promise):
            return None
        self._failing.differs(found, job.place, job.part, job.promise)
        return Ready(found)

    def _next_call(self, job: Job) -> Completion | None:
        """Make the job's next call. Returns its completion if it was the job's last call, else None."""
        if job.start is not None:
            return returned(job.start(self._connection.opened()))
        try:
            if job.step is not None and (error := job.step.error()) is not None:
                assert job.generator is not None
                job.step = job.generator.throw(error)
            else:
                if job.step is not None and job.step.stream_ordered:
                    job.step.synchronize()  # so that the program's computation on its result runs after it
                if job.generator is None:
                    assert job.program is not None
                    job.generator = job.program(self._connection.opened())
                job.step = returned(next(job.generator))
        except StopIteration as stop:
            return returned(stop.value)
        return None

    # To and from the start order

    def request(self, times: int) -> None:
        """Ask ``start_order``, if there is one, to start that many queued operations."""
        if self._start_order is not None:
            for _ in range(times):
                self._start_order.request(self)

    def next_epoch_to_start(self) -> int | None:
        """Return the current epoch if a queued collective waits to be started, else None."""
        with self.lock:
            return self._epochs.number if any(job.place for job in self._jobs) else None

    def admit(self, epoch: int, turn: Promise) -> None:
        """Let this lane's next operation start: the one that rank 0 starts in ``epoch``.

        ``turn`` is settled once that has made its last call. The same turn is given once, however often.
        """
        with self.lock:
            if turn is not self._turn:
                self._turn, self._admitted = turn, epoch
        self.drive()

    def _pass_turn(self) -> None:
        """Give back the turn given by ``admit`` without starting anything, if its operation was given up."""
        with self.lock:
            barren = self._epochs.is_exhausted and not self._jobs and self._active is None
            if self._admitted is None:
                return
            if not self._epochs.is_over:  # else the lane starts nothing more, and other lanes need the turn
                if self._admitted > self._epochs.number:
                    return  # rank 0 has settled a refusal that this rank has yet to settle
                if self._admitted == self._epochs.number and not barren:
                    return
            self._give_back()
        self._pass_on()

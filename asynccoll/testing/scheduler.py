"""Runs real threads one at a time, chosen by a seeded schedule, on a simulated clock.

Each simulated thread is an OS thread that blocks until it is handed the *baton*. It hands the baton on when
it waits and, if the schedule says so, at any *switch point*: a lock, an event, a sleep, a request. The clock
advances a little at every switch point, and jumps to the next deadline when all threads wait. So the seed
determines everything.

This module must not know what the threads do.
"""

from __future__ import annotations

import _thread
import contextvars
import hashlib
import heapq
import math
import random
import threading
import traceback
from collections.abc import Callable
from struct import Struct
from threading import get_ident

from asynccoll.testing.stacks import told
from asynccoll.testing.threads import Event, Killed, Schedule, SimulatedThread

__all__ = ["Scheduler", "install", "running"]

#: The simulated time that a switch point takes: about as long as it really takes.
TICK_SECONDS = 5e-7
_EPOCH = 1000.0
_STOP_SECONDS = 2.0
_MOST_EVENTS = 100_000
#: A switch in the digest: the number of the thread, and when. Text took three times as long.
_pack = Struct("=Qd").pack


class Scheduler:
    """The threads of one simulation, the one that is running, and the clock."""

    def __init__(self, schedule: Schedule, seed: int, most_steps: int) -> None:
        self.now: float = _EPOCH
        #: by turn: the number of the thread that ran, where that was not the default one
        self.taken: dict[int, int] = {}
        self.steps: int = 0
        self.switches: int = 0
        #: the seconds of the longest wait that timed out
        self.longest_timeout: float = 0.0
        self.current: SimulatedThread | None = None
        self.threads: dict[SimulatedThread, None] = {}
        self.gone: set[int] = set()  # ranks
        #: why the simulation was given up, and what all threads were doing then; None if it was not
        self.stuck: str | None = None
        #: describes the calls in flight, for ``stuck``
        self.in_flight: Callable[[], str] = str
        self.ends: float = math.inf  # when the simulation is given up
        #: by thread: describes what else it runs, such as the tasks of its event loop
        self.tellers: dict[SimulatedThread, Callable[[], str]] = {}
        #: by rank: cancels the task that runs ``main``, or interrupts it with the exception given
        self.cancellers: dict[int, Callable[[BaseException | None], object]] = {}
        #: what happened, when and on which rank; at most ``_MOST_EVENTS``
        self.events: list[Event] = []
        self.entered: Callable[[int], object] = lambda rank: None  # called before another rank's thread runs
        #: by rank: what makes its stores visible to all (``at_fence``)
        self.stored: dict[int, list[Callable[[], object]]] = {}
        self._seed = seed
        self._chances: dict[int, random.Random] = {}
        self._order = _drawing(f"{seed} order")
        self._schedule = schedule
        self._most_steps = most_steps
        self._turn = 0
        self._held: dict[SimulatedThread, None] = {}  # would be runnable, were they not held
        self._holds: list[tuple[float, Callable[[SimulatedThread], bool]]] = []
        self._runnable: dict[SimulatedThread, None] = {}
        self._timers: list[tuple[float, int, SimulatedThread]] = []
        self._made = 0
        self._over = threading.Event()
        self._unwinding = False
        self._digest = hashlib.blake2b(digest_size=16)
        schedule.begin(self._order)

    def chance(self, rank: int) -> random.Random:
        """Return the random numbers of ``rank``, which do not depend on what other ranks draw."""
        found = self._chances.get(rank)
        if found is None:
            found = self._chances[rank] = _drawing(f"{self._seed} rank {rank}")
        return found

    @property
    def digest(self) -> str:
        """Equal for simulations in which the same things happened, in the same order, at the same times."""
        return self._digest.hexdigest()

    @property
    def elapsed(self) -> float:
        return self.now - _EPOCH

    def tell(self, rank: int, what: str) -> None:
        """Record an event."""
        if len(self.events) < _MOST_EVENTS:
            self.events.append(Event(self.elapsed, rank, what))

    def note(self, text: str) -> None:
        """Make ``text`` a part of the digest."""
        self._digest.update(text.encode())

    # Threads

    def add(self, rank: int, name: str | None, run: Callable[[], object]) -> SimulatedThread:
        """Return a new thread that will run ``run``; it may be handed the baton from now on."""
        self._made += 1
        thread = SimulatedThread(rank, name or f"Thread-{self._made}", self._made)

        # Dropped before the thread hands the baton on: else its objects would be freed while another runs.
        jobs = [run]
        del run

        def live() -> None:
            thread.baton.acquire()
            thread.ident = get_ident()
            try:
                if not self.is_gone(thread):
                    contextvars.Context().run(jobs.pop())
            except BaseException:
                if not self.is_gone(thread):
                    self._give_up(f"{thread} ended with\n{traceback.format_exc()}")
            finally:
                jobs.clear()
                self._leave(thread)

        self.threads[thread] = None
        self._ready(thread)
        # Not threading.Thread, whose ``start`` waits until the new thread runs: two more hand-overs.
        _thread.start_new_thread(live, ())
        return thread

    def is_gone(self, thread: SimulatedThread) -> bool:
        """Whether ``thread`` is being unwound: what it still does is ignored."""
        return self._unwinding or thread.rank in self.gone

    def _leave(self, thread: SimulatedThread) -> None:
        thread.ended = True
        del self.threads[thread]
        self._runnable.pop(thread, None)
        self._held.pop(thread, None)
        for joiner in thread.joiners:
            self.wake(joiner)
        self._pass_on(thread)

    def kill(self, rank: int) -> None:
        """Unwind all threads of ``rank``, each when it next gets the baton."""
        self.gone.add(rank)
        for thread in self.threads:
            if thread.rank == rank:
                self.wake(thread)
        self._release()

    def hold(self, whom: Callable[[SimulatedThread], bool], seconds: float) -> None:
        """Keep the threads that match ``whom`` from running for ``seconds``, whatever wakes them.

        If the caller is one of them, it stops at its next switch point.
        """
        until = self.now + seconds
        self._holds.append((until, whom))
        for thread in [one for one in self._runnable if one is not self.current and self._is_held(one)]:
            del self._runnable[thread]
            self._held[thread] = None

        def release() -> None:
            self.park(until)
            self._release()

        self.add(-1, "release", release)

    def stands_still(self, rank: int) -> bool:
        """Whether all threads of ``rank`` are held, as those of a stopped process are."""
        return any(
            until > self.now and all(whom(one) for one in self.threads if one.rank == rank)
            for until, whom in self._holds
        )

    def _is_held(self, thread: SimulatedThread) -> bool:
        return not self.is_gone(thread) and any(
            until > self.now and whom(thread) for until, whom in self._holds
        )

    def _release(self) -> None:
        """Make the threads that are no longer held runnable."""
        self._holds = [one for one in self._holds if one[0] > self.now]
        for thread in [one for one in self._held if not self._is_held(one)]:
            del self._held[thread]
            self._runnable[thread] = None

    def _ready(self, thread: SimulatedThread) -> None:
        """Make ``thread`` runnable, or held."""
        if self._holds and self._is_held(thread):
            self._held[thread] = None
        else:
            self._runnable[thread] = None

    def interrupt(self, thread: SimulatedThread, error: BaseException) -> None:
        """Raise ``error`` in ``thread`` when it next gets the baton."""
        thread.interrupt = error
        self.wake(thread)

    # Running

    def run(self, real_seconds: float) -> None:
        """Hand out the baton, and wait until all threads have ended."""
        self._pass_on(None)
        try:
            over = self._over.wait(real_seconds)
        except BaseException:  # Ctrl-C, or a test's own time limit: no thread may run on afterwards
            self._stop()
            raise
        if not over:
            told = f"after {real_seconds} real seconds it was not over; {self.current} runs:\n{self.stacks()}"
            self._stop()
            raise TimeoutError(told)

    def _stop(self) -> None:
        """Unwind the threads from outside; those that are blocked in something real are left behind."""
        self._unwinding = True
        self._over.wait(_STOP_SECONDS)
        self.entered = lambda rank: None  # what is left behind goes on in a process that is real again

    def point(self) -> None:
        """Pass a switch point: another thread may run first."""
        me = self.current
        assert me is not None
        self._tick(me)
        self._turn += 1
        if self._holds and self._is_held(me):
            self.park(self.now)
        elif not self._schedule.stays(me, self._turn, self._order):
            self._yield(me)

    def statement(self) -> None:
        """Pass the switch point before a statement."""
        me = self.current
        assert me is not None
        self._tick(me)
        self._turn += 1
        if not self._schedule.stays_at_statement(me, self._turn, self._order):
            self._yield(me)

    def give_way(self, seconds: float = 0.0) -> None:
        """Advance the clock by ``seconds``, and let another thread run first, if any can."""
        me = self.current
        assert me is not None
        self.now += seconds
        self._tick(me)
        self._turn += 1
        if self._holds and self._is_held(me):
            self.park(self.now)
            return
        self._schedule.gave_way(me)
        self._yield(me, others=True)

    def _yield(self, me: SimulatedThread, *, others: bool = False) -> None:
        if len(self._runnable) == 1:
            return
        runnable = list(self._runnable)
        if others:
            runnable.remove(me)
        chosen = self._schedule.pick(runnable, self._turn, self._order)
        if chosen is not (runnable[0] if others else me):
            self.taken[self._turn] = chosen.number
        if chosen is not me:
            self._hand(chosen)
            self._take(me)

    def at_fence(self, store: Callable[[], object]) -> None:
        """Have ``store`` called at the next ``fence`` of the running thread's rank."""
        assert self.current is not None
        self.stored.setdefault(self.current.rank, []).append(store)

    def fence(self) -> None:
        """Make the rank's stores visible to all, as the running thread has taken or released a lock."""
        if self.current is not None:
            for store in self.stored.pop(self.current.rank, ()):
                store()

    def park(self, until: float = math.inf) -> bool:
        """Block until woken, or until the time ``until``; return whether another thread woke this one."""
        me = self.current
        assert me is not None
        self._tick(me)
        del self._runnable[me]
        me.runnable = me.timed_out = False
        me.until = until
        if until < math.inf:
            heapq.heappush(self._timers, (until, me.number, me))
        if self._pass_on(me):
            self._take(me)
        elif me.interrupt is not None:
            self._raise(me)
        return not me.timed_out

    def wait(self, until: float = math.inf) -> bool:
        """Like ``park``, for what another thread has to do: notes the longest wait that timed out."""
        begun = self.now
        woken = self.park(until)
        if not woken:
            self.longest_timeout = max(self.longest_timeout, self.now - begun)
        return woken

    def wake(self, thread: SimulatedThread) -> None:
        """Make a parked ``thread`` runnable."""
        if not thread.runnable and not thread.ended:
            thread.runnable = True
            thread.until = math.inf
            self._ready(thread)

    def wake_by(self, thread: SimulatedThread, until: float) -> None:
        """Have a parked ``thread`` wait no longer than until the time ``until``."""
        if not thread.runnable and until < thread.until:
            thread.until = until
            heapq.heappush(self._timers, (until, thread.number, thread))

    def _tick(self, me: SimulatedThread) -> None:
        if self._unwinding or me.rank in self.gone:
            raise Killed
        if me.interrupt is not None:
            self._raise(me)
        self.now = now = self.now + TICK_SECONDS
        self.steps += 1
        if self._timers and self._timers[0][0] <= now:
            self._ring()
        if self.steps > self._most_steps or now > self.ends:
            self._give_up(f"it is not over after {self.elapsed:.3f} s of its time and {self.steps} steps")
            raise Killed

    def _raise(self, me: SimulatedThread) -> None:
        error, me.interrupt = me.interrupt, None
        assert error is not None
        raise error

    def _ring(self) -> None:
        """Wake the threads whose deadline has passed."""
        while self._timers and self._timers[0][0] <= self.now:
            until, _, thread = heapq.heappop(self._timers)
            if not thread.runnable and not thread.ended and thread.until == until:
                self.wake(thread)
                thread.timed_out = True

    def _pass_on(self, me: SimulatedThread | None) -> bool:
        """Hand the baton to a thread that can run, and return whether that is another one than ``me``."""
        if self._unwinding:
            self.unwind()
        while not self._runnable:
            while self._timers and self._timers[0][2].until != self._timers[0][0]:
                heapq.heappop(self._timers)  # stale: the thread was woken before its deadline
            if self._timers and not self._unwinding and self._timers[0][0] <= self.ends:
                self.now = max(self.now, self._timers[0][0])
                self._ring()
            elif self.threads:
                self._give_up(
                    "no thread can go on"
                    if not self._timers
                    else "all still wait when the simulation ends (timeout=)"
                )
            else:
                self.current = None
                self._over.set()
                return True
        runnable = list(self._runnable)
        self._turn += 1
        chosen = self._schedule.pick(runnable, self._turn, self._order)
        if chosen is not runnable[0]:
            self.taken[self._turn] = chosen.number
        if chosen is me:
            return False
        self._hand(chosen)
        return True

    def _hand(self, to: SimulatedThread) -> None:
        before = self.current
        self.current = to
        self.switches += 1
        self._digest.update(_pack(to.number, self.now))
        if before is None or before.rank != to.rank:
            self.entered(to.rank)
        to.baton.release()

    def _take(self, me: SimulatedThread) -> None:
        me.baton.acquire()
        if self._unwinding or me.rank in self.gone:
            raise Killed
        if me.interrupt is not None:
            self._raise(me)

    # The end

    def _give_up(self, why: str) -> None:
        if self.stuck is None and not self._unwinding:
            self.stuck = f"{why}:\n{self.in_flight()}{self.stacks()}"
        self.unwind()

    def unwind(self) -> None:
        """End the simulation: unwind the remaining threads."""
        self._unwinding = True
        for thread in self.threads:
            self.wake(thread)
        self._release()

    def stacks(self) -> str:
        """Return what each thread is doing."""
        return told(self.threads, self._state_of, self.tellers)

    def _state_of(self, thread: SimulatedThread) -> str:
        if thread.runnable:
            return "can go on"
        return "waits" if thread.until == math.inf else f"waits until {thread.until - _EPOCH:.6f} s"


def _drawing(what: str) -> random.Random:
    return random.Random(what)  # noqa: S311  # not for secrets: it has to be reproducible


class _Running:
    """The simulation of this process, while there is one."""

    scheduler: Scheduler | None = None


_state = _Running()


def running() -> Scheduler | None:
    """Return the scheduler if the caller is its running thread, else None."""
    scheduler = _state.scheduler
    if scheduler is not None and (me := scheduler.current) is not None and me.ident == get_ident():
        return scheduler
    return None


def install(scheduler: Scheduler | None) -> None:
    """Make ``scheduler`` the one that ``running`` returns."""
    _state.scheduler = scheduler

"""Real threads of which one runs at a time, which one by a seeded choice, in a time of their own.

Each simulated thread is a thread of the system that holds still until it is handed the baton. It gives the
baton away where it waits, and, if the schedule says so, at any *switch point*: a lock, an event, a sleep, a
request. Time passes a little at every point, and jumps where all wait. So a seed decides everything.

It must not know what the threads do.
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

from asynccoll.testing.stacks import told
from asynccoll.testing.threads import Event, Killed, Schedule, SimulatedThread

__all__ = ["Scheduler", "install", "running"]

#: What a switch point costs: about as much as one does.
TICK_SECONDS = 5e-7
_EPOCH = 1000.0
_STOP_SECONDS = 2.0
_MOST_EVENTS = 100_000


class Scheduler:
    """Who runs, and what time it is."""

    def __init__(self, schedule: Schedule, seed: int, most_steps: int) -> None:
        self.now: float = _EPOCH
        #: where another than the first who could go on did: its number, by turn
        self.taken: dict[int, int] = {}
        self.steps: int = 0
        self.switches: int = 0
        #: of the waits that nobody ended before their time was up, the seconds of the longest
        self.longest_timeout: float = 0.0
        self.current: SimulatedThread | None = None
        self.threads: dict[SimulatedThread, None] = {}
        self.gone: set[int] = set()  # ranks
        #: why it ended before it was over, and what everybody did then
        self.stuck: str | None = None
        #: what the ranks have in flight, told where they are stuck
        self.in_flight: Callable[[], str] = str
        self.ends: float = math.inf  # the time at which it must be over
        #: what else there is to tell of a thread, such as the tasks of its loop
        self.tellers: dict[SimulatedThread, Callable[[], str]] = {}
        #: by rank: cancels the task of its ``main``, or has it interrupted by what is given
        self.cancellers: dict[int, Callable[[BaseException | None], object]] = {}
        #: what happened: when, to whom
        self.events: list[Event] = []
        self.entered: Callable[[int], object] = lambda rank: None  # another rank's thread goes on
        self._seed = seed
        self._chances: dict[int, random.Random] = {}
        self._order = _drawing(f"{seed} order")
        self._schedule = schedule
        self._most_steps = most_steps
        self._turn = 0
        self._held: dict[SimulatedThread, None] = {}  # who could go on, but for being held
        self._fences: dict[int, list[Callable[[], object]]] = {}  # by rank
        self._holds: list[tuple[float, Callable[[SimulatedThread], bool]]] = []
        self._runnable: dict[SimulatedThread, None] = {}
        self._timers: list[tuple[float, int, SimulatedThread]] = []
        self._made = 0
        self._over = threading.Event()
        self._unwinding = False
        self._digest = hashlib.blake2b(digest_size=16)
        schedule.begin(self._order)

    def chance(self, rank: int) -> random.Random:
        """Where the luck of ``rank`` comes from, whatever the others do."""
        found = self._chances.get(rank)
        if found is None:
            found = self._chances[rank] = _drawing(f"{self._seed} rank {rank}")
        return found

    @property
    def digest(self) -> str:
        """Equal for simulations in which the same happened, in the same order, at the same times."""
        return self._digest.hexdigest()

    @property
    def elapsed(self) -> float:
        return self.now - _EPOCH

    def tell(self, rank: int, what: str) -> None:
        """Let it be an event."""
        if len(self.events) < _MOST_EVENTS:
            self.events.append(Event(self.elapsed, rank, what))

    def note(self, text: str) -> None:
        """Let ``text`` be a part of the digest."""
        self._digest.update(text.encode())

    # Threads

    def add(self, rank: int, name: str | None, run: Callable[[], object]) -> SimulatedThread:
        """A thread that will run ``run``; it may be handed the baton from now on."""
        self._made += 1
        thread = SimulatedThread(rank, name or f"Thread-{self._made}", self._made)

        # What the thread has made goes before it hands the baton on: later it would go while another runs.
        jobs = [run]
        del run

        def live() -> None:
            thread.baton.acquire()
            thread.ident = threading.get_ident()
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
        # Not by threading.Thread, whose start waits until the new thread runs: two more hand-overs.
        _thread.start_new_thread(live, ())
        return thread

    def is_gone(self, thread: SimulatedThread) -> bool:
        """Whether it is being unwound: what it does counts for nothing."""
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
        """Unwind all threads of ``rank``, each as soon as it is its turn."""
        self.gone.add(rank)
        for thread in self.threads:
            if thread.rank == rank:
                self.wake(thread)
        self._release()

    def hold(self, whom: Callable[[SimulatedThread], bool], seconds: float) -> None:
        """Let none of ``whom`` go on for so long, whatever wakes them; the caller, too, at its next point."""
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
        """Let on who is held no more."""
        self._holds = [one for one in self._holds if one[0] > self.now]
        for thread in [one for one in self._held if not self._is_held(one)]:
            del self._held[thread]
            self._runnable[thread] = None

    def _ready(self, thread: SimulatedThread) -> None:
        """It could go on."""
        if self._holds and self._is_held(thread):
            self._held[thread] = None
        else:
            self._runnable[thread] = None

    def interrupt(self, thread: SimulatedThread, error: BaseException) -> None:
        """Raise ``error`` in it as soon as it is its turn."""
        thread.interrupt = error
        self.wake(thread)

    # Running

    def run(self, real_seconds: float) -> None:
        """Hand the baton out and wait until it comes back."""
        self._pass_on(None)
        try:
            over = self._over.wait(real_seconds)
        except BaseException:  # Ctrl-C, or a test's own limit: nobody of it may run on afterwards
            self._stop()
            raise
        if not over:
            told = f"after {real_seconds} real seconds it was not over; {self.current} runs:\n{self.stacks()}"
            self._stop()
            raise TimeoutError(told)

    def _stop(self) -> None:
        """Unwind it from outside; who waits for something real is left."""
        self._unwinding = True
        self._over.wait(_STOP_SECONDS)

    def point(self) -> None:
        """Perhaps somebody else goes on first."""
        me = self.current
        assert me is not None
        self._tick(me)
        self._turn += 1
        if self._holds and self._is_held(me):
            self.park(self.now)
        elif not self._schedule.stays(me, self._turn, self._order):
            self._yield(me)

    def statement(self) -> None:
        """The same, before a statement."""
        me = self.current
        assert me is not None
        self._tick(me)
        self._turn += 1
        if not self._schedule.stays_at_statement(me, self._turn, self._order):
            self._yield(me)

    def give_way(self, seconds: float = 0.0) -> None:
        """Let somebody else go on first, if anybody can, after so many seconds."""
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
        """Have it called as soon as the running thread's rank lets others see what it has stored."""
        assert self.current is not None
        self._fences.setdefault(self.current.rank, []).append(store)

    def fence(self) -> None:
        """The running thread has taken or released a lock: its stores are visible to all."""
        if self._fences and self.current is not None:
            for store in self._fences.pop(self.current.rank, ()):
                store()

    def park(self, until: float = math.inf) -> bool:
        """Wait to be woken, until this time at the latest; whether somebody did."""
        me = self.current
        assert me is not None
        self._tick(me)
        del self._runnable[me]
        me.runnable = False
        me.timed_out = False
        me.until = until
        if until < math.inf:
            heapq.heappush(self._timers, (until, me.number, me))
        if self._pass_on(me):
            self._take(me)
        elif me.interrupt is not None:
            self._raise(me)
        return not me.timed_out

    def wait(self, until: float = math.inf) -> bool:
        """Park for something that another thread is to do, which wakes this one; whether it did in time."""
        begun = self.now
        woken = self.park(until)
        if not woken:
            self.longest_timeout = max(self.longest_timeout, self.now - begun)
        return woken

    def wake(self, thread: SimulatedThread) -> None:
        """It may go on."""
        if not thread.runnable and not thread.ended:
            thread.runnable = True
            thread.until = math.inf
            self._ready(thread)

    def _tick(self, me: SimulatedThread) -> None:
        if self.is_gone(me):
            raise Killed
        if me.interrupt is not None:
            self._raise(me)
        self.now += TICK_SECONDS
        self.steps += 1
        if self._timers and self._timers[0][0] <= self.now:
            self._ring()
        if self.steps > self._most_steps or self.now > self.ends:
            self._give_up(f"it is not over after {self.elapsed:.3f} s of its time and {self.steps} steps")
            raise Killed

    def _raise(self, me: SimulatedThread) -> None:
        error, me.interrupt = me.interrupt, None
        assert error is not None
        raise error

    def _ring(self) -> None:
        """Wake those whose time has come."""
        while self._timers and self._timers[0][0] <= self.now:
            until, _, thread = heapq.heappop(self._timers)
            if not thread.runnable and not thread.ended and thread.until == until:
                self.wake(thread)
                thread.timed_out = True

    def _pass_on(self, me: SimulatedThread | None) -> bool:
        """Hand the baton to somebody who can go on; whether that is somebody else."""
        if self._unwinding:
            self.unwind()
        while not self._runnable:
            while self._timers and self._timers[0][2].until != self._timers[0][0]:
                heapq.heappop(self._timers)  # woken before its time
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
        self._digest.update(b"%d %.7f " % (to.number, self.now))
        if before is None or before.rank != to.rank:
            self.entered(to.rank)
        to.baton.release()

    def _take(self, me: SimulatedThread) -> None:
        me.baton.acquire()
        if self.is_gone(me):
            raise Killed
        if me.interrupt is not None:
            self._raise(me)

    # The end

    def _give_up(self, why: str) -> None:
        if self.stuck is None and not self._unwinding:
            self.stuck = f"{why}:\n{self.in_flight()}{self.stacks()}"
        self.unwind()

    def unwind(self) -> None:
        """It is over: the remaining threads end."""
        self._unwinding = True
        for thread in self.threads:
            self.wake(thread)
        self._release()

    def stacks(self) -> str:
        """What each thread is doing."""
        return told(self.threads, self._state_of, self.tellers)

    def _state_of(self, thread: SimulatedThread) -> str:
        if thread.runnable:
            return "can go on"
        return "waits" if thread.until == math.inf else f"waits until {thread.until - _EPOCH:.6f} s"


def _drawing(what: str) -> random.Random:
    return random.Random(what)  # noqa: S311  # it hides nothing: it is to come out the same


class _Running:
    """The simulation of this process, while there is one."""

    scheduler: Scheduler | None = None


_state = _Running()


def running() -> Scheduler | None:
    """The scheduler, if it is one of its threads that asks."""
    scheduler = _state.scheduler
    if scheduler is not None and (me := scheduler.current) is not None and me.ident == threading.get_ident():
        return scheduler
    return None


def install(scheduler: Scheduler | None) -> None:
    """From now on this is the one."""
    _state.scheduler = scheduler

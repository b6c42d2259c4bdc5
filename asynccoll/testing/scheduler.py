"""Real threads of which one runs at a time, which one by a seeded choice, in a time of their own.

Each simulated thread is a thread of the system that holds still until it is handed the baton. It gives the
baton away where it waits, and, if the schedule says so, at any *switch point*: a lock, an event, a sleep, a
request. Time passes a little at every point, and jumps where all wait. So a seed decides everything.

It must not know what the threads do.
"""

from __future__ import annotations

import contextvars
import hashlib
import heapq
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Killed", "Scheduler", "SimulatedThread", "running"]

#: What a switch point costs: about as much as one does.
TICK_SECONDS = 5e-7
_EPOCH = 1000.0
_STOP_SECONDS = 2.0
#: Frames of these say nothing.
_UNTOLD = ("/asynccoll/testing/", "/threading.py", "/asyncio/base_events.py")


class Killed(BaseException):
    """Unwinds a thread whose rank is gone, or whose simulation is over; nothing that it does counts."""


class Schedule(Protocol):
    """Who is next."""

    def begin(self, chance: random.Random) -> None:
        """A simulation begins."""

    def stays(self, thread: SimulatedThread, chance: random.Random) -> bool:
        """Whether ``thread``, which could go on, does."""

    def pick(self, runnable: list[SimulatedThread], chance: random.Random) -> SimulatedThread:
        """Which of these runs next."""

    def gave_way(self, thread: SimulatedThread) -> None:
        """It has nothing to do but to look again."""


class SimulatedThread:
    """One thread of one rank, as the scheduler sees it."""

    __slots__ = (
        "baton",
        "ended",
        "ident",
        "joiners",
        "name",
        "number",
        "rank",
        "runnable",
        "timed_out",
        "until",
    )

    def __init__(self, rank: int, name: str, number: int) -> None:
        self.rank = rank
        self.name = name
        self.number = number
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ident = 0
        self.runnable = True
        self.until = math.inf  # when it wakes by itself
        self.timed_out = False
        self.ended = False
        self.joiners: list[SimulatedThread] = []

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.name}"


class Scheduler:
    """Who runs, and what time it is."""

    def __init__(self, schedule: Schedule, seed: int, most_steps: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311  # it hides nothing: it is to come out the same
        self.now = _EPOCH
        self.steps = 0
        self.switches = 0
        self.current: SimulatedThread | None = None
        self.threads: dict[SimulatedThread, None] = {}
        self.gone: set[int] = set()  # ranks
        #: why it ended before it was over, and what everybody did then
        self.stuck: str | None = None
        self.ends = math.inf  # the time at which it must be over
        #: what else there is to tell of a thread, such as the tasks of its loop
        self.tellers: dict[SimulatedThread, Callable[[], str]] = {}
        self.entered: Callable[[int], object] = lambda rank: None  # another rank's thread goes on
        self._schedule = schedule
        self._most_steps = most_steps
        self._runnable: dict[SimulatedThread, None] = {}
        self._timers: list[tuple[float, int, SimulatedThread]] = []
        self._made = 0
        self._over = threading.Event()
        self._unwinding = False
        self._digest = hashlib.blake2b(digest_size=16)
        schedule.begin(self.chance)

    @property
    def digest(self) -> str:
        """Equal for simulations in which the same happened, in the same order, at the same times."""
        return self._digest.hexdigest()

    @property
    def elapsed(self) -> float:
        return self.now - _EPOCH

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
        self._runnable[thread] = None
        threading.Thread(target=live, name=f"simulated-{thread.number}", daemon=True).start()
        return thread

    def is_gone(self, thread: SimulatedThread) -> bool:
        """Whether it is being unwound: what it does counts for nothing."""
        return self._unwinding or thread.rank in self.gone

    def _leave(self, thread: SimulatedThread) -> None:
        thread.ended = True
        del self.threads[thread]
        self._runnable.pop(thread, None)
        for joiner in thread.joiners:
            self.wake(joiner)
        self._pass_on(thread)

    def kill(self, rank: int) -> None:
        """Unwind all threads of ``rank``, each as soon as it is its turn."""
        self.gone.add(rank)
        for thread in self.threads:
            if thread.rank == rank:
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
        if not self._schedule.stays(me, self.chance):
            self._yield(me)

    def give_way(self, seconds: float = 0.0) -> None:
        """Let somebody else go on first, if anybody can, after so many seconds."""
        me = self.current
        assert me is not None
        self.now += seconds
        self._tick(me)
        self._schedule.gave_way(me)
        self._yield(me, others=True)

    def _yield(self, me: SimulatedThread, *, others: bool = False) -> None:
        if len(self._runnable) == 1:
            return
        runnable = list(self._runnable)
        if others:
            runnable.remove(me)
        chosen = self._schedule.pick(runnable, self.chance)
        if chosen is not me:
            self._hand(chosen)
            self._take(me)

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
        return not me.timed_out

    def wake(self, thread: SimulatedThread) -> None:
        """It may go on."""
        if not thread.runnable and not thread.ended:
            thread.runnable = True
            thread.until = math.inf
            self._runnable[thread] = None

    def _tick(self, me: SimulatedThread) -> None:
        if self.is_gone(me):
            raise Killed
        self.now += TICK_SECONDS
        self.steps += 1
        if self._timers and self._timers[0][0] <= self.now:
            self._ring()
        if self.steps > self._most_steps or self.now > self.ends:
            self._give_up(f"it is not over after {self.elapsed:.3f} s of its time and {self.steps} steps")
            raise Killed

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
                    "nobody can go on" if not self._timers else "everybody waits for longer than it lasts"
                )
            else:
                self.current = None
                self._over.set()
                return True
        chosen = self._schedule.pick(list(self._runnable), self.chance)
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

    # The end

    def _give_up(self, why: str) -> None:
        if self.stuck is None and not self._unwinding:
            self.stuck = f"{why}:\n{self.stacks()}"
        self.unwind()

    def unwind(self) -> None:
        """It is over: whoever is left ends."""
        self._unwinding = True
        for thread in self.threads:
            self.wake(thread)

    def stacks(self) -> str:
        """What each thread is doing, its own frames left out."""
        frames = sys._current_frames()
        parts = []
        for thread in self.threads:
            frame: Any = frames.get(thread.ident)
            if frame is not None:
                lines = traceback.format_stack(frame)
                ours = [line for line in lines if not any(file in line for file in _UNTOLD)]
                more = self.tellers[thread]() if thread in self.tellers else ""
                if ours or more:
                    parts.append(f"{thread} ({self._state_of(thread)}):\n{''.join(ours[-8:])}{more}")
        return "\n".join(parts)

    def _state_of(self, thread: SimulatedThread) -> str:
        if thread.runnable:
            return "can go on"
        return "waits" if thread.until == math.inf else f"waits until {thread.until - _EPOCH:.6f} s"


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

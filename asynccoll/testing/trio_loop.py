"""trio in a simulated world: its own run loop, with another clock, another way to wake it, and no files.

``trio.run`` is two private functions and a loop around them, which is written here once more; its order of
tasks, which is random, comes from the seed. They are the same in every version from 0.22 on.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from asynccoll.testing.scheduler import Scheduler
from asynccoll.testing.stacks import function_of, suspended
from asynccoll.testing.threads import Killed, SimulatedThread

if TYPE_CHECKING:
    import trio

__all__ = ["ordered", "run_trio"]


#: What a turn of a loop takes.
_TURN_SECONDS = 20e-6


class _Wakeup:
    """What ``run_sync_soon`` wakes the loop by; it holds a real lock then, so nobody else may go on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._task: trio.lowlevel.Task | None = None
        self._sleeper: SimulatedThread | None = None
        self._woken = False

    def wakeup_thread_and_signal_safe(self) -> None:
        self._woken = True
        if self._sleeper is not None:
            self._scheduler.wake(self._sleeper)

    async def wait_woken(self) -> None:
        import trio

        if self._woken:
            await trio.lowlevel.checkpoint()
        while not self._woken:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._forget)
        self._woken = False

    def _forget(self, _: object) -> Any:
        import trio

        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def turn(self, runner: Any, seconds: float) -> None:
        """Sleep as the loop would, and go on with who waits to be woken."""
        if seconds <= 0:
            self._scheduler.give_way(_TURN_SECONDS)
        elif not self._woken:
            self._sleeper = self._scheduler.current
            self._scheduler.park(self._scheduler.now + seconds if seconds < math.inf else math.inf)
            self._sleeper = None
        if self._woken and self._task is not None:
            task, self._task = self._task, None
            runner.reschedule(task)

    def wakeup_on_signals(self) -> None:
        """There are no signals."""

    def close(self) -> None:
        """There is nothing to close."""


def _clock(scheduler: Scheduler) -> trio.abc.Clock:
    import trio

    class Clock(trio.abc.Clock):
        def start_clock(self) -> None:
            """It runs."""

        def current_time(self) -> float:
            return scheduler.now

        def deadline_to_sleep_time(self, deadline: float) -> float:
            return deadline - scheduler.now

    return Clock()


def run_trio(scheduler: Scheduler, main: Coroutine[object, object, object]) -> object:
    """As ``trio.run``."""
    import sniffio
    import trio
    from trio._core import _run

    scopes: list[trio.CancelScope] = []

    async def whole() -> object:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            return await main
        raise trio.Cancelled._create()  # as asyncio has it

    whole.__module__, whole.__qualname__ = "main", function_of(main)  # of which trio makes the task's name
    runner: Any = _run.setup_runner(_clock(scheduler), [], False, True)
    runner.entry_queue.wakeup.close()
    wakeup = runner.entry_queue.wakeup = _Wakeup(scheduler)
    me = scheduler.current
    assert me is not None
    scheduler.tellers[me] = lambda: _told(runner)

    def cancel(interrupt: BaseException | None) -> None:
        if interrupt is not None:
            runner.deliver_ki()
        else:
            runner.entry_queue.run_sync_soon(lambda: [scope.cancel() for scope in scopes])

    scheduler.cancellers[me.rank] = cancel
    turns = _run.unrolled_run(runner, whole, ())
    before, sniffio.thread_local.name = sniffio.thread_local.name, "trio"  # as trio.run says who it is
    try:
        seconds = next(turns)
        while True:
            wakeup.turn(runner, seconds)
            seconds = turns.send([])
    except StopIteration:
        return runner.main_task_outcome.unwrap()
    except Killed:
        _abandon(runner, turns)
        raise
    finally:
        del scheduler.cancellers[me.rank]
        turns.close()
        sniffio.thread_local.name = before


def _abandon(runner: Any, turns: Any) -> None:
    """End what is left of a run that was killed: here, where nobody hears what it says to that."""
    from trio._core._run import GLOBAL_RUN_CONTEXT

    tasks = list(runner.tasks)
    for task in tasks:
        for nursery in task.child_nurseries:
            nursery._children.clear()
    GLOBAL_RUN_CONTEXT.runner = runner
    for task in tasks:
        GLOBAL_RUN_CONTEXT.task = task
        for _ in range(10):  # some wait once more
            with contextlib.suppress(BaseException):
                task.coro.close()
                break
    with contextlib.suppress(BaseException):
        turns.throw(Killed())


def _told(runner: Any) -> str:
    return "".join(f"  task {task.name!r}:\n{suspended(task.coro)}" for task in runner.tasks)


@contextlib.contextmanager
def ordered(seed: int) -> Iterator[None]:
    """For the block, trio's order of tasks comes from ``seed``."""
    from trio._core import _run

    before = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r
    chance = random.Random(seed)  # noqa: S311  # it hides nothing: it is to come out the same
    _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r = True, chance  # type: ignore[misc]  # trio's own switch
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r = before  # type: ignore[misc]  # as above

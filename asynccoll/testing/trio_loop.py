"""trio in a simulated world: its own run loop, with a simulated clock and wakeup, and no files.

``trio.run`` is a loop around two private functions, which are the same in every version from 0.22 on. This
module has its own loop around them. trio's random order of tasks comes from the seed.
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


#: The simulated time that a turn of the loop takes if it does not sleep.
_TURN_SECONDS = 20e-6


class _Wakeup:
    """Wakes the loop for ``run_sync_soon``, which holds a real lock: this must not be a switch point."""

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
        """Sleep as the loop would, then reschedule the task in ``wait_woken`` if the loop was woken."""
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
        """Do nothing: there are no signals."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _clock(scheduler: Scheduler) -> trio.abc.Clock:
    import trio

    class Clock(trio.abc.Clock):
        def start_clock(self) -> None:
            """Do nothing: it is always running."""

        def current_time(self) -> float:
            return scheduler.now

        def deadline_to_sleep_time(self, deadline: float) -> float:
            return deadline - scheduler.now

    return Clock()


def run_trio(scheduler: Scheduler, main: Coroutine[object, object, object]) -> object:
    """Run ``main`` as ``trio.run`` does."""
    import sniffio
    import trio
    from trio._core import _run

    scopes: list[trio.CancelScope] = []

    async def whole() -> object:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            return await main
        raise trio.Cancelled._create()  # cancelled: raise, as on asyncio

    whole.__module__, whole.__qualname__ = "main", function_of(main)  # trio names the task after these
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
            with contextlib.suppress(trio.RunFinishedError):  # there is nothing left to cancel
                runner.entry_queue.run_sync_soon(lambda: [scope.cancel() for scope in scopes])

    scheduler.cancellers[me.rank] = cancel
    turns = _run.unrolled_run(runner, whole, ())
    before, sniffio.thread_local.name = sniffio.thread_local.name, "trio"  # as trio.run does
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
    """Close the tasks of a killed run here, where the errors that they raise are suppressed."""
    from trio._core._run import GLOBAL_RUN_CONTEXT

    tasks = list(runner.tasks)
    for task in tasks:
        for nursery in task.child_nurseries:
            nursery._children.clear()
    GLOBAL_RUN_CONTEXT.runner = runner
    for task in tasks:
        GLOBAL_RUN_CONTEXT.task = task
        for _ in range(10):  # some await again while they are closed
            with contextlib.suppress(BaseException):
                task.coro.close()
                break
    with contextlib.suppress(BaseException):
        turns.throw(Killed())


def _told(runner: Any) -> str:
    return "".join(f"  task {task.name!r}:\n{suspended(task.coro)}" for task in runner.tasks)


@contextlib.contextmanager
def ordered(seed: int) -> Iterator[None]:
    """Derive trio's order of tasks from ``seed``, for the block."""
    from trio._core import _run

    before = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r
    chance = random.Random(seed)  # noqa: S311  # not for secrets: it has to be reproducible
    _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r = True, chance  # type: ignore[misc]  # trio's own switch
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r = before  # type: ignore[misc]  # as above

"""asyncio in a simulated world: its own event loop, with a simulated selector and clock."""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from asynccoll.testing.scheduler import Scheduler, running
from asynccoll.testing.stacks import function_of, suspended
from asynccoll.testing.threads import Killed, SimulatedThread

__all__ = ["run_asyncio"]


#: The simulated time that a turn of the loop takes if it does not sleep.
_TURN_SECONDS = 20e-6


class _Selector(selectors.BaseSelector):
    """A selector without files: it sleeps until the loop is woken, or until the timeout."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._sleeper: SimulatedThread | None = None
        self._woken = False

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            self._scheduler.give_way(_TURN_SECONDS)  # a loop that polls must not starve other threads
        elif not self._woken:
            self._sleeper = self._scheduler.current
            self._scheduler.park(math.inf if timeout is None else self._scheduler.now + timeout)
            self._sleeper = None
        self._woken = False
        return []

    def wake(self) -> None:
        self._woken = True
        if self._sleeper is not None:
            self._scheduler.wake(self._sleeper)

    def register(self, fileobj: object, events: int, data: object = None) -> Any:
        raise NotImplementedError("a simulated loop has no files or sockets")

    def unregister(self, fileobj: object) -> Any:
        raise NotImplementedError("a simulated loop has no files or sockets")

    def get_map(self) -> Mapping[Any, Any]:
        return {}


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _AsyncioLoop(asyncio.SelectorEventLoop):
    """The event loop of one rank."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._simulated = _Selector(scheduler)
        self._scheduler = scheduler
        super().__init__(self._simulated)
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coroutine, **options: _Task(coroutine, number=next(numbers), loop=loop, **options)
        )

    def tell(self) -> str:
        """Return where each task is suspended, and its function: asyncio's names only number the tasks."""
        return "".join(
            f"  task {task.get_name()!r} ({function_of(task.get_coro())}):\n{suspended(task.get_coro())}"
            for task in asyncio.all_tasks(self)
        )

    def time(self) -> float:
        return self._scheduler.now

    def default_exception_handler(self, context: dict[str, object]) -> None:
        """Ignore tasks that were unwound, or were left suspended when the loop was closed."""
        if not self.is_closed() and not isinstance(context.get("exception"), Killed):
            super().default_exception_handler(context)

    def _make_self_pipe(self) -> None:
        """Do nothing: ``_write_to_self`` wakes the selector without a pipe."""

    def _close_self_pipe(self) -> None:
        """Do nothing: there is no pipe."""

    def _write_to_self(self) -> None:
        if running() is None:
            raise RuntimeError(
                "a thread that is not simulated wakes a simulated loop: use asynccoll's or asyncio's threads"
            )
        self._scheduler.point()
        self._simulated.wake()

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> Any:
        """Run ``func`` in a simulated thread."""
        future: asyncio.Future[object] = self.create_future()
        me = self._scheduler.current
        assert me is not None

        def run() -> None:
            result, failure = None, None
            try:
                result = func(*args)
            except Exception as error:
                failure = error
            if not self.is_closed():  # after Ctrl-C nothing waits for the result
                self.call_soon_threadsafe(_finish, future, result, failure)

        self._scheduler.add(me.rank, None, run)
        self._scheduler.point()
        return future


def _finish(future: asyncio.Future[object], result: object, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _nothing() -> None:
    """Do nothing: scheduling this wakes the loop."""


def run_asyncio(scheduler: Scheduler, main: Coroutine[object, object, object]) -> Any:
    """Run ``main`` as ``asyncio.run`` does."""
    loop = _AsyncioLoop(scheduler)
    me = scheduler.current
    assert me is not None
    scheduler.tellers[me] = loop.tell
    interrupts: list[BaseException] = []
    try:
        asyncio.set_event_loop(loop)
        whole = loop.create_task(main)

        def cancel(interrupt: BaseException | None) -> None:
            interrupts.extend([interrupt] if interrupt is not None else [])
            whole.cancel()  # immediately, as asyncio.run does at Ctrl-C, even if it never suspends again
            loop.call_soon_threadsafe(_nothing)

        scheduler.cancellers[me.rank] = cancel
        try:
            return loop.run_until_complete(whole)
        except asyncio.CancelledError:
            if interrupts:
                raise interrupts[0] from None
            raise
        finally:
            del scheduler.cancellers[me.rank]
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()

"""An event loop as a waiter sees it: whether its turn is over, how to yield to it, how to sleep in it.

A *turn* is the interval between two times that the loop runs its other tasks. Waits in place (``suspending``)
may hold a turn for a millisecond; after that the waiter yields to the loop. asyncio's own selector loop can
be asked what it has to do: the waiter yields as soon as a timer is due, and while the loop has nothing to do,
the turn is prolonged by a millisecond at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any
from weakref import WeakKeyDictionary

from asynccoll import host
from asynccoll.host.actors import asyncio_task, trio_task
from asynccoll.order.operation import INLINE_SECONDS

#: Registers a waker. Returns a function that unregisters it, so that a waiter that has stopped waiting is not
#: kept in memory until the operation ends.
AddWaker = Callable[[Callable[[], object]], Callable[[], object]]

_running_loop = asyncio._get_running_loop


class Loop:
    """An asyncio loop that cannot be asked what it has to do (uvloop; Windows' proactor).

    All that is known is when its current turn began.
    """

    __slots__ = ("ends",)

    #: How many iterations the loop needs to run the callbacks that were due, and the tasks that they woke.
    rounds = 2

    def __init__(self) -> None:
        self.ends: float = -math.inf  # until when waits in place may hold the current turn

    def over(self, now: float) -> bool:
        """Whether to yield now: a timer is due, or the turn's time is up and other tasks may be ready."""
        return now >= self.ends

    def due(self, now: float) -> float:
        """Return the seconds until the loop's next timer is due; infinity if no timer is known."""
        return math.inf

    def may_last(self, now: float) -> bool:
        """Prolong the turn if the loop is known to be idle for another millisecond. Returns whether it is."""
        return False

    def others_ready(self) -> bool:
        """Whether other tasks or callbacks of the loop may be ready to run."""
        return True

    def begin_turn(self) -> None:
        """Begin a new turn: the loop has just run its other tasks."""
        self.ends = host.monotonic() + INLINE_SECONDS

    def give_turn(self) -> Generator[Any, object, None]:
        """Yield to the loop if its turn is over, or if the task was cancelled: the yield raises that."""
        if self.over(host.monotonic()) or is_cancelled(_running_loop()):
            for _ in range(self.rounds):
                yield
                if not self.others_ready():
                    break
            self.begin_turn()

    def park(self, add_waker: AddWaker, seconds: float) -> Generator[object, object, None]:
        """Suspend the task until the waker is called or ``seconds`` have passed."""
        loop: Any = _running_loop()
        future = loop.create_future()

        def wake() -> None:
            # The loop may be closed while the operation is in flight; then there is no task left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, future)

        forget = add_waker(wake)
        timer = loop.call_later(max(0.0, seconds), _resolve, future) if seconds < math.inf else None
        try:
            yield from future
        finally:
            forget()
            if timer is not None:
                timer.cancel()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def is_cancelled(loop: object) -> bool:
    """Whether the running task was cancelled, and its next yield will raise ``CancelledError``."""
    return getattr(asyncio_task(loop), "_must_cancel", False)


class _SelectorLoop(Loop):
    """asyncio's own loop, which can be asked what it has to do.

    The attributes of asyncio read here are private, and the same in every version since 3.4. On a loop that
    is not asked, a 1 ms heartbeat next to a stream of small calls is a millisecond late.
    """

    __slots__ = ("_loop",)

    #: The callback of a ready timer or socket runs in the second iteration, the task it wakes in the third.
    rounds = 3

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self._loop = weakref.ref(loop)

    def over(self, now: float) -> bool:
        return self.due(now) <= 0.0 or (now >= self.ends and not self._prolong(now, now))

    def due(self, now: float) -> float:
        loop = self._loop()
        timers = None if loop is None else loop._scheduled
        return float(timers[0]._when - now) if timers else math.inf

    def may_last(self, now: float) -> bool:
        return self._prolong(now, now + INLINE_SECONDS)

    def others_ready(self) -> bool:
        loop = self._loop()
        return loop is not None and (bool(loop._ready) or loop._stopping)

    def _prolong(self, now: float, until: float) -> bool:
        """Prolong the turn unless a callback or file descriptor is ready, or a timer is due by ``until``.

        Nor if the loop was told to stop, which it does once it gets its turn. Returns whether the turn was
        prolonged. An iteration of the loop costs ten times more than asking it.
        """
        loop = self._loop()
        if (
            loop is None
            or loop._ready
            or loop._stopping
            or self.due(until) <= 0.0
            or loop._selector.select(0)
        ):
            return False
        self.ends = now + INLINE_SECONDS
        return True


class _TrioLoop(Loop):
    """A trio run, which cannot be asked what it has to do either."""

    __slots__ = ()

    def give_turn(self) -> Generator[object, object, None]:
        import trio

        if self.over(host.monotonic()):
            for _ in range(self.rounds):  # trio runs the tasks of one batch in random order
                yield from trio.lowlevel.checkpoint().__await__()
            self.begin_turn()
        else:
            yield from trio.lowlevel.checkpoint_if_cancelled().__await__()

    def park(self, add_waker: AddWaker, seconds: float) -> Generator[object, object, None]:
        import trio

        token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()
        parked = True

        def resume() -> None:  # runs in the loop's thread, so the flag needs no lock
            nonlocal parked
            if parked:
                parked = False
                trio.lowlevel.reschedule(task)

        def wake() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(resume)

        def abort(_: object) -> Any:
            nonlocal parked
            parked = False
            return trio.lowlevel.Abort.SUCCEEDED

        forget: Callable[[], object] | None = None
        try:
            forget = add_waker(wake)
            with trio.move_on_after(max(0.0, seconds)):
                yield from trio.lowlevel.wait_task_rescheduled(abort).__await__()
        finally:
            parked = False  # Ctrl-C may end this before the task is parked, and it may park elsewhere next
            if forget is not None:
                forget()


def _seen(loop: object) -> Loop:
    if isinstance(loop, asyncio.SelectorEventLoop):
        return _SelectorLoop(loop)
    return _TrioLoop() if type(loop).__name__ == "TrioToken" else Loop()


_seen_loops: WeakKeyDictionary[object, Loop] = WeakKeyDictionary()
#: The loop that was looked up last, which is nearly always the next one as well.
_latest: tuple[Any, Loop] = (lambda: None, Loop())


def _known(loop: object) -> Loop:
    global _latest  # noqa: PLW0603  # a cache of one
    known, latest = _latest
    if known() is loop:
        return latest
    found = _seen_loops.get(loop) or _seen_loops.setdefault(loop, _seen(loop))
    _latest = (weakref.ref(loop), found)
    return found


def here() -> Loop | None:
    """Return the event loop that the caller runs in, or None."""
    # trio first: under its guest mode an asyncio loop runs in the same thread.
    if "trio" in sys.modules and trio_task() is not None:
        return _known(sys.modules["trio"].lowlevel.current_trio_token())
    loop = _running_loop()
    return None if loop is None else _known(loop)


def on_asyncio() -> tuple[object, Loop] | None:
    """Return the running asyncio loop, as itself and as a ``Loop``.

    None if no asyncio loop is running here, or if trio is imported: the caller may then be running in trio.
    """
    loop = _running_loop()
    if loop is None or "trio" in sys.modules:
        return None
    return loop, _known(loop)

"""How a waiter sleeps: on asyncio, on trio, or as a plain thread.

Waiting is adaptive. A waiter that finds the operation done returns. If it is expected to end soon, the
waiter waits in place with the GIL released, which costs no wake-up across threads. Else it suspends, and
the completing thread wakes it.

*Soon* is a millisecond. It belongs to the turn of the loop, not to the operation: once the loop has had no
turn for that long, and something there is ready to run, the await yields, so that a stream of small
operations does not starve the other tasks. A loop that can be asked gets its turn as soon as a timer is
due; while it has nothing to do, the turn is prolonged a millisecond at a time, and *soon* is a few of them.

Cancelling a waiter stops the waiting, never the operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from asynccoll import host
from asynccoll.errors import CollectiveTimeoutError
from asynccoll.host.actors import asyncio_task, trio_task
from asynccoll.order.operation import INLINE_SECONDS

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation
    from asynccoll.transport.completion import Completion

__all__ = ["Signal", "attend", "block", "in_loop", "pause", "quick", "suspend"]

#: What is returned forgets the waker: who has stopped waiting is not kept until the operation ends.
AddWaker = Callable[[Callable[[], object]], Callable[[], object]]

#: For how long at most a turn is prolonged for one operation.
_PATIENCE_SECONDS = 4e-3
#: A thread in a native wait cannot take signals; this is how late Ctrl-C may be.
_SLICE_SECONDS = 0.1
_running_loop = asyncio._get_running_loop


class _Turn:
    """Until when the current turn of one event loop may be held by inline waits.

    Of this loop nothing is known but that it has had no turn (uvloop; Windows' proactor).
    """

    __slots__ = ("ends",)

    #: How often the loop has to go round until what was due has run, and the tasks that it woke.
    rounds = 2

    def __init__(self) -> None:
        self.ends = -math.inf

    def over(self, now: float) -> bool:
        """Whether the loop is to be given a turn: a timer is due, or it is time and there may be work."""
        return now >= self.ends

    def due(self, now: float) -> float:
        """Seconds until its next timer is due."""
        return math.inf

    def may_last(self, now: float) -> bool:
        """Whether the loop is known to have nothing to do for another millisecond."""
        return False

    def others_ready(self) -> bool:
        """Whether something else may want to run in this turn."""
        return True


class _SelectorTurn(_Turn):
    """The same of a loop of asyncio's own, which can be asked what it has to do.

    These attributes of asyncio are private, and the same in every version from 3.4 on.
    """

    __slots__ = ("_loop",)

    #: A timer or a socket that is ready has its callback in the second, the task it wakes in the third.
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
        return loop is not None and bool(loop._ready)

    def _prolong(self, now: float, until: float) -> bool:
        """Let the turn last if no callback, timer or file descriptor is ready by ``until``.

        A turn of the loop costs ten times more than asking.
        """
        loop = self._loop()
        if loop is None or loop._ready or self.due(until) <= 0.0 or loop._selector.select(0):
            return False
        self.ends = now + INLINE_SECONDS
        return True


class _TrioTurn(_Turn):
    """The same of a run of trio's, which knows when its next deadline is.

    ``trio.lowlevel.current_statistics()`` says so, too, and looks at every socket that is waited for.
    """

    __slots__ = ()

    def over(self, now: float) -> bool:
        return now >= self.ends or self.due(now) <= 0.0

    def due(self, now: float) -> float:  # trio has a clock of its own
        runner = _trio_runner()
        return float(runner.deadlines.next_deadline() - runner.current_time())


def _trio_runner() -> Any:
    return sys.modules["trio"]._core._run.GLOBAL_RUN_CONTEXT.runner


def _made_for(loop: Any) -> _Turn:
    if isinstance(loop, asyncio.SelectorEventLoop):
        return _SelectorTurn(loop)
    if type(loop).__name__ == "TrioToken":
        with contextlib.suppress(AttributeError):  # a trio that is made otherwise
            _trio_runner().deadlines.next_deadline()
            return _TrioTurn()
    return _Turn()


_turns: WeakKeyDictionary[Any, _Turn] = WeakKeyDictionary()


#: The loop that was asked for last, and its turn: nearly always the next one, too.
_latest: tuple[Any, _Turn] = (lambda: None, _Turn())


def _turn_of(loop: Any) -> _Turn:
    global _latest  # noqa: PLW0603  # a cache of one
    known, turn = _latest
    if known() is loop:
        return turn
    turn = _turns.get(loop) or _turns.setdefault(loop, _made_for(loop))
    _latest = (weakref.ref(loop), turn)
    return turn


def _late(operation: Operation) -> CollectiveTimeoutError:
    waited = host.monotonic() - operation.started
    operation.extend()
    opening = operation.lane.communicator is None
    why = ": its lane is not open yet, for a member of the group has made no call on it" if opening else ""
    return CollectiveTimeoutError(
        f"{operation!r} is not ready after {waited:.3f} s{why}. It is still in flight, and later calls on "
        "its lane wait behind it; await the same work again to go on waiting"
    )


def block(operation: Operation, seconds: float | None) -> None:
    """Wait without a loop, at most ``seconds`` from now and to the operation's own deadline."""
    now = host.monotonic()
    deadline = operation.deadline if seconds is None else min(operation.deadline, now + seconds)
    completion = operation.completion
    if deadline - now > _SLICE_SECONDS and completion.wait(_SLICE_SECONDS):
        operation.over = completion.fine and operation.failure is None
        return
    operation.attend()
    try:
        while not operation.done():
            left = deadline - host.monotonic()
            if left <= 0:
                raise _late(operation)
            completion.wait(min(left, _SLICE_SECONDS))
    finally:
        operation.leave()


def quick(operation: Operation) -> bool:
    """Whether the operation is done, or ends while it is waited for in place.

    The whole of an await in the common case, in one call: no generator, no look at what is not needed.
    Where there is more to it (trio, a turn that is over, a cancelled task), ``suspend`` sees to it.
    """
    loop = _running_loop()
    if loop is None or "trio" in sys.modules:
        return False
    known, turn = _latest
    if known() is not loop:
        turn = _turn_of(loop)
    now = host.monotonic()
    if turn.over(now) or getattr(asyncio_task(loop), "_must_cancel", False):
        return False
    return _inline(operation, turn, now)


def suspend(operation: Operation) -> Generator[Any, Any, None]:
    """Wait as a coroutine on the running event loop."""
    loop, task = _here()
    if loop is None:
        if not operation.done():
            raise RuntimeError(
                f"await of {operation!r} outside an event loop; use work.wait(), or asyncio.run or trio.run"
            )
        return
    turn = _turn_of(loop)
    yield from _asyncio_turn(loop, turn) if task is None else _trio_turn(turn)
    if operation.failure is not None or _inline(operation, turn, host.monotonic()):
        return
    operation.attend()
    try:
        yield from _park(loop, task, operation.add_waker, operation.deadline - host.monotonic())
        turn.ends = host.monotonic() + INLINE_SECONDS
    finally:
        operation.leave()
    if not operation.done():
        raise _late(operation)
    operation.estimate.took(host.monotonic() - operation.started)


def attend(operation: Operation) -> Generator[Any, Any, bool]:
    """Give the loop its turn, then wait in place if that is likely to be enough; whether it is done."""
    loop, task = _here()
    turn = _turn_of(loop)
    yield from _asyncio_turn(loop, turn) if task is None else _trio_turn(turn)
    return operation.failure is not None or _inline(operation, turn, host.monotonic())


def pause() -> Generator[Any, Any, None]:
    """Give the loop a turn if it had none for a while: for awaits of what is ready anyway."""
    loop, task = _here()
    if loop is not None:
        turn = _turn_of(loop)
        yield from _asyncio_turn(loop, turn) if task is None else _trio_turn(turn)


class Signal:
    """A one-shot event that any thread may set and one task may await."""

    __slots__ = ("_set", "_waker")

    def __init__(self) -> None:
        self._set = False
        self._waker: Callable[[], object] | None = None

    def set(self) -> None:
        self._set = True
        waker = self._waker
        if waker is not None:
            waker()

    def _add_waker(self, waker: Callable[[], object]) -> Callable[[], object]:
        self._waker = waker
        if self._set:
            waker()
        return self._forget_waker

    def _forget_waker(self) -> None:
        self._waker = None

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until it is set or ``seconds`` have passed; whether it is set."""
        await _Parked(self._add_waker, seconds)
        return self._set


class _Parked:
    """An awaitable of ``_park``."""

    __slots__ = ("_add_waker", "_seconds")

    def __init__(self, add_waker: AddWaker, seconds: float) -> None:
        self._add_waker = add_waker
        self._seconds = seconds

    def __await__(self) -> Generator[Any, Any, None]:
        loop, task = _here()
        yield from _park(loop, task, self._add_waker, self._seconds)


def _here() -> tuple[Any, Any]:
    """The running loop (asyncio's, or trio's token) and, on trio, its current task."""
    # trio first: under its guest mode an asyncio loop runs in the same thread.
    if "trio" in sys.modules and (task := trio_task()) is not None:
        return sys.modules["trio"].lowlevel.current_trio_token(), task
    return _running_loop(), None


def _park(loop: Any, task: Any, add_waker: AddWaker, seconds: float) -> Generator[Any, Any, None]:
    """Suspend until the waker is called or ``seconds`` have passed."""
    seconds = max(0.0, seconds)
    if task is None:
        return _park_on_asyncio(loop, add_waker, seconds)
    return _park_on_trio(task, add_waker, seconds)


def _inline(operation: Operation, turn: _Turn, now: float) -> bool:
    """Wait in place if that is likely to be enough; whether the operation is done."""
    completion = operation.completion
    estimate = operation.estimate
    elapsed = now - operation.started
    left = estimate.seconds - elapsed
    lasts = left if left > 0.0 else INLINE_SECONDS  # what is late may be so for long
    if left < 0.0 and completion.done():
        estimate.at_most(elapsed)  # it may have been so for long
        completion.wait(INLINE_SECONDS)  # which also sees whether it ended well
    elif (
        not completion.blockable
        or left > _PATIENCE_SECONDS
        or (lasts > turn.due(now) and not completion.done())
        or (left > INLINE_SECONDS and not turn.may_last(now))
    ):
        return operation.done()
    elif _hold(completion, turn, now):
        estimate.took(host.monotonic() - operation.started)
    else:
        return operation.done()
    operation.over = completion.fine and operation.failure is None
    return True


def _hold(completion: Completion, turn: _Turn, now: float) -> bool:
    """Wait in place for as long as the turn may last; whether it is done."""
    until = now + _PATIENCE_SECONDS
    while not completion.wait(INLINE_SECONDS):
        now = host.monotonic()
        if now >= until or not turn.may_last(now):
            turn.ends = -math.inf  # its time is spent
            return False
    return True


# asyncio


def _asyncio_turn(loop: Any, turn: _Turn) -> Generator[Any, Any, None]:
    if turn.over(host.monotonic()) or _must_cancel(loop):
        for _ in range(turn.rounds):
            yield
            if not turn.others_ready():
                break
        turn.ends = host.monotonic() + INLINE_SECONDS


def _must_cancel(loop: Any) -> bool:
    """Whether the running task was cancelled and has not been told: the next yield tells it."""
    return getattr(asyncio_task(loop), "_must_cancel", False)


def _park_on_asyncio(loop: Any, add_waker: AddWaker, seconds: float) -> Generator[Any, Any, None]:
    future = loop.create_future()

    def wake() -> None:
        # The loop may be closed while the operation is out: then nobody waits there any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, future)

    forget = add_waker(wake)
    timer = loop.call_later(seconds, _resolve, future) if seconds < math.inf else None
    try:
        yield from future
    finally:
        forget()
        if timer is not None:
            timer.cancel()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# trio


def _trio_turn(turn: _Turn) -> Generator[Any, Any, None]:
    import trio

    if turn.over(host.monotonic()):
        for _ in range(turn.rounds):  # tasks of one round run in any order
            yield from trio.lowlevel.checkpoint().__await__()
        turn.ends = host.monotonic() + INLINE_SECONDS
    else:
        yield from trio.lowlevel.checkpoint_if_cancelled().__await__()


def _park_on_trio(task: Any, add_waker: AddWaker, seconds: float) -> Generator[Any, Any, None]:
    import trio

    token = trio.lowlevel.current_trio_token()
    parked = True

    def resume() -> None:  # in the loop's thread, so that the flag needs no lock
        nonlocal parked
        if parked:
            parked = False
            trio.lowlevel.reschedule(task)

    def wake() -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(resume)

    def abort(_: Any) -> Any:
        nonlocal parked
        parked = False
        return trio.lowlevel.Abort.SUCCEEDED

    forget = add_waker(wake)
    try:
        with trio.move_on_after(seconds):
            yield from trio.lowlevel.wait_task_rescheduled(abort).__await__()
    finally:
        forget()


def in_loop() -> bool:
    """Whether the caller runs in an event loop, which a long computation would hold."""
    return _here()[0] is not None

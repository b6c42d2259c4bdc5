"""How a waiter sleeps: on asyncio, on trio, or as a plain thread.

Waiting is adaptive. If the operation is done, the waiter returns. If the operation is expected to complete
soon, the waiter waits *in place*: it blocks its thread with the GIL released, which costs no wake-up across
threads. Otherwise it suspends, and the completing thread wakes it.

Waiting in place keeps the event loop from running other tasks. The interval between two times that the loop
runs them is a *turn* (``loops``). A turn lasts a millisecond, however many operations are awaited in it.
After that the await yields if another task may be ready, so that a stream of small operations does not starve
other tasks. While the loop is known to have nothing else to do, the turn is prolonged, by a few milliseconds
for one operation.

Cancelling a waiter stops the waiting, never the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from asynccoll import host
from asynccoll.errors import CollectiveTimeoutError
from asynccoll.order.operation import INLINE_SECONDS, Operation
from asynccoll.transport.completion import Completion
from asynccoll.waiting.loops import AddWaker, Loop, here, is_cancelled, on_asyncio

#: The longest wait in place for one operation, when the loop is idle.
_PATIENCE_SECONDS = 4e-3
#: A thread in a native wait cannot handle signals; Ctrl-C takes effect after this long at the latest.
_SLICE_SECONDS = 0.1


#: Added to the timeout error of a wait that blocked an event loop whose other tasks were ready to run: the
#: other ranks may be waiting for calls of those tasks.
_HELD = (
    ". This rank waited without await (in wait() or asynccoll.sync), so no other task of its event loop "
    "could make a call in the meantime: use await there"
)


def late(operation: Operation, why: str = "") -> CollectiveTimeoutError:
    """Build the timeout error for a waiter of ``operation``, and extend the deadline if it has passed.

    The next wait then has the operation's full timeout again. ``why`` is added to the error's first sentence.
    """
    waited = host.monotonic() - operation.started
    blame = operation.lane.world.blame(operation)
    operation.extend()  # only now: ``blame`` asks other ranks, which may take as long as the timeout itself
    who = ":" + "\n ".join(f" {sentence}" for sentence in blame.sentences) if blame.sentences else ""
    # A message has no place in its lane's order (its sequence is 0): nothing waits behind it.
    behind = ", and later calls on its lane wait behind it" if operation.sequence else ""
    return CollectiveTimeoutError(
        f"{operation} is not ready after {waited:.3f} s{who}{why}.\n"
        f"This rank's {operation.title} is still pending{behind}; await the same work again "
        f"to go on waiting{operation.lane.world.dump()}",
        blame.ranks,
        pending=True,
        operation=operation.name,
        lane=operation.lane.name,
    )


def block(operation: Operation, seconds: float | None) -> None:
    """Wait without a loop, until ``seconds`` from now or the operation's own deadline, whichever is earlier.

    Raises ``CollectiveTimeoutError`` at that time. Returns when the operation is done, even if it failed.
    """
    now = host.monotonic()
    deadline = operation.deadline if seconds is None else min(operation.deadline, now + seconds)
    completion = operation.completion
    # A wait that ends within the first slice is not registered with the watchdog (``attend``).
    if deadline - now > _SLICE_SECONDS and completion.wait(_SLICE_SECONDS):
        operation.saw_end(host.monotonic())
        return
    operation.attend()
    try:
        while not operation.done():
            left = deadline - host.monotonic()
            if left > 0:
                completion.wait(min(left, _SLICE_SECONDS))
            elif not operation.tell():
                loop = here()
                raise late(operation, _HELD if loop is not None and loop.others_ready() else "")
        operation.saw_end(host.monotonic())
    except BaseException:
        operation.give_up()
        raise
    operation.leave()


def quick(operation: Operation) -> bool:
    """Wait in place if that is likely to be enough. Returns whether the operation is done.

    In the common case this is the entire await, in one call without a generator. It also returns False if the
    waiter must first yield to the loop (trio, a turn that is over, a cancelled task): ``suspend`` does that.
    """
    found = on_asyncio()
    if found is None:
        return False
    native, loop = found
    now = host.monotonic()
    if loop.over(now) or is_cancelled(native):
        return False
    return _inline(operation, loop, now)


def suspend(operation: Operation) -> Generator[object, object, None]:
    """Wait as a coroutine on the running event loop; raise ``CollectiveTimeoutError`` after the deadline."""
    loop = here()
    if loop is None:
        if not operation.done():
            raise RuntimeError(
                f"await of {operation!r} outside an event loop; use work.wait(), or asyncio.run or trio.run"
            )
        return
    yield from loop.give_turn()
    if operation.told or _inline(operation, loop, host.monotonic()):
        return
    operation.attend()
    try:
        yield from loop.park(operation.add_waker, operation.deadline - host.monotonic())
        loop.begin_turn()
    except BaseException:
        operation.give_up()
        raise
    operation.leave()
    if not operation.done() and not operation.tell():
        raise late(operation)
    now = host.monotonic()
    operation.estimate.took(now - operation.started)
    operation.saw_end(now)


def attend(operation: Operation) -> Generator[object, object, bool]:
    """Yield to the loop if its turn is over, then wait in place if that is likely to be enough.

    Returns whether the operation is done; it does not suspend the task until then.
    """
    loop = _required()
    yield from loop.give_turn()
    return operation.told or _inline(operation, loop, host.monotonic())


def pause() -> Generator[object, object, None]:
    """Yield to the loop if its turn is over: for awaits of works that are already done."""
    loop = here()
    if loop is not None:
        yield from loop.give_turn()


def in_loop() -> bool:
    """Whether the caller runs in an event loop, whose other tasks a long computation would hold up."""
    return here() is not None


class Signal:
    """A one-shot event that any thread may set and a single task may await."""

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
        # ``set`` writes _set first and then reads _waker, so one of the two sees the other's write.
        if self._set:
            waker()
        return self._forget_waker

    def _forget_waker(self) -> None:
        self._waker = None

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until the signal is set or ``seconds`` have passed. Returns whether it is set."""
        await _Parked(self._add_waker, seconds)
        return self._set


class _Parked:
    """An awaitable that calls ``Loop.park`` of the running loop."""

    __slots__ = ("_add_waker", "_seconds")

    def __init__(self, add_waker: AddWaker, seconds: float) -> None:
        self._add_waker = add_waker
        self._seconds = seconds

    def __await__(self) -> Generator[object, object, None]:
        yield from _required().park(self._add_waker, self._seconds)


def _required() -> Loop:
    loop = here()
    if loop is None:
        raise RuntimeError("no event loop is running here; use asyncio.run or trio.run")
    return loop


def _inline(operation: Operation, loop: Loop, now: float) -> bool:
    """Wait in place if that is likely to be enough. Returns whether the operation is done."""
    completion = operation.completion
    estimate = operation.estimate
    elapsed = now - operation.started
    left = estimate.seconds - elapsed
    lasts = left if left > 0.0 else INLINE_SECONDS  # an overdue operation may take any time
    if left < 0.0 and completion.done():
        estimate.at_most(elapsed)  # it is unknown when the operation ended
        completion.wait(INLINE_SECONDS)  # does not block: makes the completion record whether it succeeded
    elif (
        not completion.blockable
        or left > _PATIENCE_SECONDS
        or (lasts > loop.due(now) and not completion.done())
        or (left > INLINE_SECONDS and not loop.may_last(now))
    ):
        if not operation.done():
            return False
    elif _hold(completion, loop, now):
        now = host.monotonic()
        estimate.took(now - operation.started)
    elif not operation.done():
        return False
    operation.saw_end(now)
    return True


def _hold(completion: Completion, loop: Loop, now: float) -> bool:
    """Wait in place for as long as the turn may last. Returns whether the completion is done."""
    until = now + _PATIENCE_SECONDS
    while not completion.wait(INLINE_SECONDS):
        now = host.monotonic()
        if now >= until or not loop.may_last(now):
            loop.ends = -math.inf  # the turn is over
            return False
    return True

"""How a waiter sleeps: on asyncio, on trio, or as a plain thread.

Waiting is adaptive. A waiter that finds the operation done returns. If it is expected to end soon, the
waiter waits in place with the GIL released, which costs no wake-up across threads. Else it suspends, and
the completing thread wakes it.

*Soon* is a millisecond. It belongs to the turn of the loop (``loops``), not to the operation: once the loop
has had no turn for that long, and something there is ready to run, the await yields, so that a stream of
small operations does not starve the other tasks. While a loop has nothing to do, *soon* is a few of them.

Cancelling a waiter stops the waiting, never the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.errors import CollectiveTimeoutError
from asynccoll.order.operation import INLINE_SECONDS
from asynccoll.waiting.loops import AddWaker, Loop, here, is_cancelled, on_asyncio

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation
    from asynccoll.transport.completion import Completion

__all__ = ["Signal", "attend", "block", "in_loop", "late", "pause", "quick", "suspend"]

#: For how long at most a turn is prolonged for one operation.
_PATIENCE_SECONDS = 4e-3
#: A thread in a native wait cannot take signals; this is how late Ctrl-C may be.
_SLICE_SECONDS = 0.1


#: What other ranks may wait for, where a task waits in a way that holds its loop.
_HELD = (
    ". This rank waited without await (by wait(), or asynccoll.sync), so that no other task of its event "
    "loop could call anything meanwhile: await it there"
)


def late(operation: Operation, why: str = "") -> CollectiveTimeoutError:
    """The error of who has waited for it in vain; the next wait has as long again."""
    waited = host.monotonic() - operation.started
    blame = operation.lane.world.blame(operation)
    operation.extend()  # not earlier: asking may take as long as the next wait may last
    who = f": {blame}" if str(blame) else ""
    behind = ", and later calls on its lane wait behind it" if operation.sequence else ""  # not a message
    return CollectiveTimeoutError(
        f"{operation} is not ready after {waited:.3f} s{who}{why}. "
        f"This rank's {operation.title} is still in flight{behind}; await the same work again "
        f"to go on waiting{operation.lane.world.dump()}",
        blame.ranks,
        operation=operation.name,
        lane=operation.lane.name,
    )


def block(operation: Operation, seconds: float | None) -> None:
    """Wait without a loop, at most ``seconds`` from now and to the operation's own deadline."""
    now = host.monotonic()
    deadline = operation.deadline if seconds is None else min(operation.deadline, now + seconds)
    completion = operation.completion
    if deadline - now > _SLICE_SECONDS and completion.wait(_SLICE_SECONDS):
        operation.saw_end(host.monotonic())
        return
    operation.attend()
    try:
        while not operation.done():
            left = deadline - host.monotonic()
            if left <= 0:
                loop = here()
                raise late(operation, _HELD if loop is not None and loop.others_ready() else "")
            completion.wait(min(left, _SLICE_SECONDS))
        operation.saw_end(host.monotonic())
    except BaseException:
        operation.give_up()
        raise
    operation.leave()


def quick(operation: Operation) -> bool:
    """Whether the operation is done, or ends while it is waited for in place.

    The whole of an await in the common case, in one call: no generator, no look at what is not needed.
    Where there is more to it (trio, a turn that is over, a cancelled task), ``suspend`` sees to it.
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
    """Wait as a coroutine on the running event loop."""
    loop = here()
    if loop is None:
        if not operation.done():
            raise RuntimeError(
                f"await of {operation!r} outside an event loop; use work.wait(), or asyncio.run or trio.run"
            )
        return
    yield from loop.give_turn()
    if operation.failure is not None or _inline(operation, loop, host.monotonic()):
        return
    operation.attend()
    try:
        yield from loop.park(operation.add_waker, operation.deadline - host.monotonic())
        loop.begin_turn()
    except BaseException:
        operation.give_up()
        raise
    operation.leave()
    if not operation.done():
        raise late(operation)
    now = host.monotonic()
    operation.estimate.took(now - operation.started)
    operation.saw_end(now)


def attend(operation: Operation) -> Generator[object, object, bool]:
    """Give the loop its turn, then wait in place if that is likely to be enough; whether it is done."""
    loop = _required()
    yield from loop.give_turn()
    return operation.failure is not None or _inline(operation, loop, host.monotonic())


def pause() -> Generator[object, object, None]:
    """Give the loop a turn if it had none for a while: for awaits of what is ready anyway."""
    loop = here()
    if loop is not None:
        yield from loop.give_turn()


def in_loop() -> bool:
    """Whether the caller runs in an event loop, which a long computation would hold."""
    return here() is not None


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
    """An awaitable of ``Loop.park``."""

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
    """Wait in place for as long as the turn may last; whether it is done."""
    until = now + _PATIENCE_SECONDS
    while not completion.wait(INLINE_SECONDS):
        now = host.monotonic()
        if now >= until or not loop.may_last(now):
            loop.ends = -math.inf  # its time is spent
            return False
    return True

"""Waits for a call of a `compositions.Program`, in a task of an event loop or in a plain thread.

Both have the same interface: plain threads run coroutines that never suspend (``driven``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint

import asynccoll as ac
from asynccoll import host
from compositions import Call
from compositions_compared import Complain, Record

__all__ = ["TIMEOUTS", "Looped", "Threaded", "Waiter", "Ways", "driven"]

T = TypeVar("T")

#: Time limits of a call that is waited for again whenever its time limit has passed.
TIMEOUTS = (1e-4, 1e-3, 2e-2)
#: The longest time of waiting again and again: less than an operation's own time limit.
_LONGEST_SECONDS = 10.0
#: How often a condition is checked without a pause; then the pauses double from the shortest to the longest.
_LOOKS = 5
_PAUSES = (1e-4, 2e-2)


class Ways(Protocol):
    """The ways of waiting, which depend on where one waits."""

    async def checkpoint(self) -> None:
        """Let others run."""

    async def until(self, holds: Callable[[], bool]) -> None:
        """Poll until ``holds`` returns true."""

    async def rest(self, seconds: float) -> None:
        """Sleep for ``seconds``."""

    async def got(self, work: Any) -> Any:
        """Wait for ``work``, and return its result."""

    def scoped(self, scope: ac.scope) -> AbstractAsyncContextManager[Any]:
        """Enter ``scope`` for the duration of the block."""

    async def result(self, call: Call, record: Record, complain: Complain) -> Any:
        """Wait as the call says, and return the result."""

    async def results(self, call: Call, records: Sequence[Record]) -> None:
        """Wait for all of them together; afterwards each is done."""


def driven(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError(f"{coroutine!r} waits for an event loop in a plain thread")


class Looped:
    """Waits in a task of asyncio or trio."""

    def __init__(self, loop: str) -> None:
        self._asyncio = loop == "asyncio"

    async def checkpoint(self) -> None:
        await checkpoint()

    async def rest(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(_LOOKS):
            if holds():
                return
            await checkpoint()
        for pause in _pauses():
            if holds():
                return
            await anyio.sleep(pause)

    async def got(self, work: Any) -> Any:
        return await work

    def scoped(self, scope: ac.scope) -> AbstractAsyncContextManager[Any]:
        return scope

    async def result(self, call: Call, record: Record, complain: Complain) -> Any:
        work = record.work
        if record.waiter is not None:
            await self.until(record.waiter.ended)
            return record.waiter.outcome()
        match call.wait:
            case "thread":
                return await anyio.to_thread.run_sync(work.wait)
            case "blocking":
                return work.wait()
            case "host":
                return await work.on_host()
            case "future" if self._asyncio:
                return await work.as_future()
            case "two futures" if self._asyncio:
                return _one(complain, record, await asyncio.gather(work.as_future(), work.as_future()))
            case "completed":
                async for done in ac.as_completed([work]):
                    return done.result()
            case "both":
                return _one(complain, record, await self._twice(work))
            case "plain thread":
                waiters = [Waiter([work])]
                await self.until(waiters[0].ended)
                return waiters[0].outcome()
            case "threads":
                waiters = [Waiter([work]), Waiter([work])]
                with contextlib.suppress(Exception):  # raised again below
                    await work
                for one in waiters:
                    await self.until(one.ended)
                return _one(complain, record, [*(one.outcome() for one in waiters), await work])
            case "cut short":
                with anyio.move_on_after(TIMEOUTS[call.seed % len(TIMEOUTS)]):
                    return await work
            case "deadline":
                for pause in _while_out(work):
                    with contextlib.suppress(ac.CollectiveTimeoutError):
                        return await work
                    await anyio.sleep(pause)
            case _:
                await _looked_at(self.until, call, work)
        return await work

    async def _twice(self, work: Any) -> list[Any]:
        """Wait for ``work`` in two tasks, and return both results."""
        results: list[Any] = []
        errors: list[Exception] = []

        async def waiter() -> None:
            try:
                results.append(await work)
            except Exception as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiter)
            tasks.start_soon(waiter)
        if errors:
            raise errors[0]
        return results

    async def results(self, call: Call, records: Sequence[Record]) -> None:
        works = [record.work for record in records]
        with contextlib.suppress(Exception):  # each work is asked for its own error later
            match call.seed % 3:
                case 0:
                    await ac.wait_all(works)
                case 1:
                    await _all_completed(works, TIMEOUTS[call.seed // 3 % len(TIMEOUTS)])
                case _:
                    for work in _turned(records):
                        with contextlib.suppress(Exception):
                            await work


class Threaded:
    """Waits in a plain thread."""

    async def checkpoint(self) -> None:
        host.give_way()

    async def rest(self, seconds: float) -> None:
        host.sleep(seconds)

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(_LOOKS):
            if holds():
                return
            host.give_way()
        for pause in _pauses():
            if holds():
                return
            host.sleep(pause)

    async def got(self, work: Any) -> Any:
        return _waited(work)

    @contextlib.asynccontextmanager
    async def scoped(self, scope: ac.scope) -> AsyncIterator[None]:
        with scope:
            yield

    async def result(self, call: Call, record: Record, complain: Complain) -> Any:
        work = record.work
        if record.waiter is not None:
            await self.until(record.waiter.ended)
            return record.waiter.outcome()
        match call.wait:
            case "thread" | "plain thread":
                waiter = Waiter([work])
                await self.until(waiter.ended)
                return waiter.outcome()
            case "both" | "threads":
                waiters = [Waiter([work]), Waiter([work])]
                with contextlib.suppress(Exception):  # as above
                    _waited(work)
                for one in waiters:
                    await self.until(one.ended)
                return _one(complain, record, [*(one.outcome() for one in waiters), _waited(work)])
            case "cut short":
                with contextlib.suppress(ac.CollectiveTimeoutError):
                    return _waited(work, TIMEOUTS[call.seed % len(TIMEOUTS)])
            case "deadline":
                for pause in _while_out(work):
                    with contextlib.suppress(ac.CollectiveTimeoutError):
                        return _waited(work)
                    host.sleep(pause)
            case _:
                await _looked_at(self.until, call, work)
        return _waited(work)

    async def results(self, call: Call, records: Sequence[Record]) -> None:
        for work in _turned(records):
            with contextlib.suppress(Exception):  # as above
                _waited(work)


def _waited(work: Any, *seconds: float) -> Any:
    """Wait for the result, ignoring Ctrl-C."""
    while True:
        try:
            return work.wait(*seconds)
        except KeyboardInterrupt:
            continue


def _turned(records: Sequence[Record]) -> list[Any]:
    """Return their works, on even ranks in reverse, so that ranks wait on different lanes at a time."""
    works = [record.work for record in records]
    return works if records[0].rank % 2 else works[::-1]


async def _looked_at(until: Callable[[Callable[[], bool]], Any], call: Call, work: Any) -> None:
    """Poll or use a callback or a future until it is done, instead of waiting for it."""
    match call.wait:
        case "result" | "exception":
            await until(work.done)
            if call.wait == "exception" and (error := work.exception()) is not None:
                raise error
            work.result()
        case "callback":
            heard: list[Any] = []
            work.add_done_callback(heard.append)
            await until(lambda: bool(heard))
            heard[0].result()
        case "concurrent":
            future = work.as_concurrent_future()
            await until(future.done)
            future.result()
        case "late":
            with contextlib.suppress(ac.CollectiveTimeoutError):
                work.wait(1e-5)


def _pauses() -> Iterator[float]:
    pause, longest = _PAUSES
    while True:
        yield pause
        pause = min(2 * pause, longest)


def _while_out(work: Any) -> Iterator[float]:
    """Yield ever longer pauses until ``work`` is done: a lane that was given up raises the same error again.

    Not forever: a rank that has lost its store does not learn that a peer has given up.
    """
    begun = host.monotonic()
    for pause in _pauses():
        if work.done() or host.monotonic() - begun >= _LONGEST_SECONDS:
            return
        yield pause


async def _all_completed(works: Sequence[Any], seconds: float) -> None:
    """Wait for the works one by one; after a timeout, start over with twice the timeout.

    Not forever, as above.
    """
    while seconds < _LONGEST_SECONDS:
        try:
            async for work in ac.as_completed(works, timeout=seconds):
                work.exception()
        except ac.CollectiveTimeoutError:
            seconds *= 2
        else:
            return


def _one(complain: Complain, record: Record, results: Sequence[Any]) -> Any:
    """Complain unless all waiters got the same object, and return it."""
    if any(one is not results[0] for one in results):
        complain("twice", f"{record.label}: {len(results)} waiters have got different objects")
    return results[0]


class Waiter:
    """A plain thread that waits for works, then calls ``then``; its result is the first work's."""

    def __init__(self, works: Sequence[Any], then: Callable[[], object] = bool) -> None:
        self._then = then
        self._value: Any = None
        self._error: Exception | None = None
        self._thread = host.Thread(target=self._wait, args=(works,), daemon=True)
        self._thread.start()

    def _wait(self, works: Sequence[Any]) -> None:
        try:
            self._value, *_ = [work.wait() for work in works]
            self._then()
        except Exception as error:
            self._error = error

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

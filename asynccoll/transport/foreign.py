"""What others have started, as completions: torch's works and futures, a device's events, mpi4py's requests.

Told apart by what they can do, so that nothing has to be imported that is not there.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from asynccoll.errors import PayloadTypeError, collective_error
from asynccoll.transport.completion import Completion, Promise
from asynccoll.transport.progress import progress
from asynccoll.transport.waiters import Waiters

__all__ = ["Foreign", "foreign"]

#: The end of something, and how to get its result once it is there.
Foreign = tuple[Completion, Callable[[], object]]

_waiters = Waiters("asynccoll-adopted")


def foreign(x: Any) -> Foreign:
    """The completion of ``x``, and what gives its result; refuses what is none of those."""
    if isinstance(x, dist.Work):
        return _of_work(x)
    if isinstance(x, torch.futures.Future):
        return _told(x), x.value
    if isinstance(x, concurrent.futures.Future):
        return _told(x), x.result
    if callable(getattr(x, "query", None)) and callable(getattr(x, "synchronize", None)):
        return Polled(x.query), lambda: None
    if callable(getattr(x, "test", None)) and callable(getattr(x, "Get_status", None)):
        return _of_request(x)
    raise PayloadTypeError(
        f"cannot wait for a {type(x).__name__}; expected a torch Work or Future, a concurrent Future, an "
        "event of a device, an mpi4py Request, or a list of these (coroutines and asyncio's futures are "
        "awaited as they are)"
    )


def _told(future: Any) -> Completion:
    """Of a future that calls back; what it failed with is raised where its result is asked for."""
    promise = Promise()
    future.add_done_callback(lambda _: promise.settle())
    return promise


def _of_work(work: dist.Work) -> Foreign:
    """Of a work of torch's. Its ``wait`` orders the waiter's stream, on devices that have some."""

    def result() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_error(error, f"an adopted {type(work).__name__}") from error

    try:
        return _told(work.get_future()), result
    except RuntimeError:  # gloo's messages have no future: a thread waits for them
        promise = Promise()

        def wait() -> None:
            try:
                work.wait()
            except BaseException as error:
                promise.settle(error)
            else:
                promise.settle()

        _waiters.submit(id(work), wait)
        return promise, lambda: None


def _of_request(request: Any) -> Foreign:
    """Of a request of mpi4py's: its message, where it carries one."""
    found: list[object] = []

    def test() -> bool:
        over, message = request.test()
        if over:
            found.append(message)
        return bool(over)

    return Polled(test), lambda: found[0]


class Polled(Completion):
    """What has to be asked whether it is over: by its waiter, else by the progress thread."""

    attended = False
    urgent = False
    lateness: float | None = 0.01

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._promise = Promise()
        progress.watch(self)

    @property
    def finished(self) -> bool:
        """Somebody has seen its end."""
        return self._promise.done()

    def expected(self) -> float:
        """Nothing is known of it."""
        return 0.0

    def poll(self) -> bool:
        """Ask, and tell the waiters."""
        if not self._promise.done():
            try:
                if self._ask():
                    self._promise.settle()
            except BaseException as error:  # the library's: raised in the waiter
                self._promise.settle(error)
        return self._promise.done()

    def done(self) -> bool:
        return self._promise.done()

    def wait(self, seconds: float) -> bool:
        return self._promise.wait(seconds)

    def add_callback(self, callback: Callable[[], object]) -> None:
        self._promise.add_callback(callback)

    def error(self) -> BaseException | None:
        return self._promise.error()

"""Other libraries' handles as completions: torch's works and futures, a device's events, mpi4py's requests.

Handles are recognized by their methods, so no library has to be imported.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from asynccoll.errors import PayloadTypeError, collective_error
from asynccoll.host.misfits import named_type
from asynccoll.transport.completion import Completion, Promise
from asynccoll.transport.progress import progress
from asynccoll.transport.waiters import Waiters

#: The completion of a handle, and a function that returns the handle's result once done.
Foreign = tuple[Completion, Callable[[], object]]

_waiters = Waiters("asynccoll-adopted")


def foreign(x: Any) -> Foreign:
    """Return the completion of ``x``, and a function that returns its result once done.

    Raises ``PayloadTypeError`` if ``x`` is not a handle of a known kind.
    """
    if isinstance(x, dist.Work):
        return _of_work(x)
    if isinstance(x, torch._C.Future):  # torch.futures.Future is a subclass; a torch Work's future is one too
        return _told(x), x.value
    if isinstance(x, concurrent.futures.Future):
        return _told(x), x.result
    if callable(getattr(x, "query", None)) and callable(getattr(x, "synchronize", None)):
        return Polled(x.query), lambda: None
    if callable(getattr(x, "test", None)) and callable(getattr(x, "Get_status", None)):
        return _of_request(x)
    raise PayloadTypeError(
        f"cannot wait for {named_type(x)}; expected a torch Work or Future, a concurrent Future, a device "
        "event, an mpi4py Request, or a list of these (await coroutines and asyncio futures directly)"
    )


def _told(future: Any) -> Completion:
    """Return the completion of a future with callbacks. It has no error: the future's result raises that."""
    promise = Promise()
    future.add_done_callback(lambda _: promise.settle())
    return promise


def _of_work(work: dist.Work) -> Foreign:
    """Adopt a torch work. Its ``wait`` also orders the waiter's stream, on devices that have streams."""

    def result() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_error(error, f"an adopted {type(work).__name__}") from error

    try:
        return _told(work.get_future()), result
    except RuntimeError:  # gloo's point-to-point works have no future: a thread waits for them
        return _waiters.run(id(work), work.wait, Promise()), lambda: None


def _of_request(request: Any) -> Foreign:
    """Adopt an mpi4py request; the result is its message, if it has one."""
    found: list[object] = []

    def test() -> bool:
        over, message = request.test()
        if over:
            found.append(message)
        return bool(over)

    return Polled(test), lambda: found[0]


class Polled(Promise):
    """A completion that the progress thread polls until it is over."""

    attended = False
    urgent = False
    lateness: float | None = 0.01

    def __init__(self, ask: Callable[[], bool]) -> None:
        super().__init__()
        self._ask = ask
        progress.watch(self)

    @property
    def finished(self) -> bool:
        """Whether a poll has found it over."""
        return self.done()

    def expected(self) -> float:
        """Return 0: how long it takes is unknown."""
        return 0.0

    def poll(self) -> bool:
        """Ask whether it is over, and if so complete. Returns whether it is over."""
        if not self.done():
            try:
                if self._ask():
                    self.settle()
            except BaseException as error:  # raised by the other library: the waiter gets it
                self.settle(error)
        return self.done()

"""``adopt``: awaits an operation that another library has started, as a ``Work``.

Such a work has a deadline and a waiter, and errors name the line that adopted it. But it has no number in the
order of a lane: neither the operation nor the ranks that take part in it are known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asynccoll import host
from asynccoll.errors import CollectiveError, PayloadTypeError, collective_error
from asynccoll.health.blame import Blame
from asynccoll.host.call_site import caller
from asynccoll.host.misfits import fitting
from asynccoll.host.timeouts import check_timeout
from asynccoll.order.operation import Estimate, Operation
from asynccoll.runtime.process import current
from asynccoll.transport.completion import Completion
from asynccoll.transport.foreign import foreign
from asynccoll.waiting.work import Work, noted
from asynccoll.world.context import Context

#: Older than any record in the flight recorder, so that nothing is recorded for an adopted operation.
_NO_TICKET = -(1 << 40)


@fitting
def adopt(x: object, /, *, timeout: float | None = None) -> Work[Any]:
    """Return a work for an operation that another library has started, to await on asyncio or trio.

    ``x`` is a torch ``Work`` (its tensors are filled; the result is None), a torch or concurrent ``Future``
    (the result is its value), a CUDA event (None), an mpi4py ``Request`` (its message), or a list of these (a
    list). Without an event loop, call ``wait()``.

    >>> handle = torch.distributed.all_reduce(x, async_op=True)
    >>> await ac.adopt(handle, timeout=60)            # while other tasks of the loop run

    If the operation fails, the work raises a ``CollectiveError`` with the library's error as its cause; for a
    future, the future's own exception. It raises ``CollectiveTimeoutError`` if the operation is not complete
    ``timeout`` seconds after the call (default: the timeout of ``initialize``). A thread tests an mpi4py
    request until it completes: do not test the request, or wait for it, yourself.

    Raises:
        PayloadTypeError: ``x`` is something else.
    """
    check_timeout(timeout)
    _check_not_ours(x)
    if not isinstance(x, (list, tuple)):
        completion, result = foreign(x)
        return _work(type(x).__name__, [completion], result, timeout)
    parts = [foreign(each) for each in x]
    name = " and ".join(sorted({type(each).__name__ for each in x})) or "nothing"
    return _work(name, [part[0] for part in parts], lambda: [part[1]() for part in parts], timeout)


def _check_not_ours(x: object) -> None:
    for each in x if isinstance(x, (list, tuple)) else (x,):
        if isinstance(each, Work):
            raise PayloadTypeError(
                f"{each!r} is already a Work of asynccoll: await it directly (together with adopted ones: "
                "await ac.wait_all([work, ac.adopt(handle)]))"
            )


def _work(
    what: str, completions: list[Completion], result: Callable[[], object], timeout: float | None
) -> Work[object]:
    operations = tuple(_operation(what, completion, timeout) for completion in completions)
    return noted(Work(operations, result))


def _operation(what: str, completion: Completion, timeout: float | None) -> Operation:
    beside: Any = _Beside(current())
    limit = beside.world.timeout if timeout is None else timeout
    estimate = Estimate(f"adopted {what}")
    return Operation(beside, estimate, 0, completion, caller(), limit, host.monotonic(), _NO_TICKET)


class _Beside:
    """Stands in for the lane of an adopted operation, with the attributes that waiters use."""

    name = key = "none"
    epoch = 0

    def __init__(self, context: Context) -> None:
        self.communicator = self.group = self.world = _Around(context)

    def __str__(self) -> str:
        return "no lane"

    def explain_failure(self, operation: Operation, native: BaseException) -> CollectiveError:
        """Return the typed error with ``native`` as its cause."""
        return collective_error(native, f"{operation.name} from {operation.place}")


class _Around:
    """Stands in for the world of an adopted operation: nothing watches it, and no rank can be blamed."""

    def __init__(self, context: Context) -> None:
        self.timeout = context.timeout
        self.device = context.device
        self.recorder = context.recorder
        self.backend = context.backend

    def blame(self, operation: Operation) -> Blame:
        """Return a ``Blame`` without ranks: it is not known what the operation waits for."""
        return Blame(operation.name, "", (), ())

    def dump(self) -> str:
        """Return an empty string: nothing is dumped."""
        return ""

    def watch_over(self, operation: Operation, waiters: int = 1) -> None:
        """Do nothing: there are no peers to check on."""

    watch_no_more = watch_over

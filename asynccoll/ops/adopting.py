"""``adopt``: what others have started, awaited as a ``Work`` of ours.

It has a place, a deadline and a waiter like any other, and no place in the order of a lane: of what it is,
and who else takes part in it, nothing is known here.
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

__all__ = ["adopt"]

#: Older than any record: nothing is written of it.
_NO_TICKET = -(1 << 40)


@fitting
def adopt(x: object, /, *, timeout: float | None = None) -> Work[Any]:
    """A work of what something else has started, to be awaited on asyncio or trio, or by ``wait()``.

    ``x`` is a torch ``Work`` (its tensors are filled; the result is None), a torch or concurrent ``Future``
    (its value), a CUDA event (None), an mpi4py ``Request`` (its message), or a list of these (a list).

    >>> handle = torch.distributed.all_reduce(x, async_op=True)
    >>> await ac.adopt(handle, timeout=60)            # while other tasks of the loop run

    It ends with the error of what was adopted: a ``CollectiveError``, whose cause that is; of a future its
    own exception. ``timeout`` in seconds is counted from the call (by default as ``initialize`` says):
    ``CollectiveTimeoutError``. A request of mpi4py's is tested by a thread until it is over: do not test it,
    nor wait for it, yourself.

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
                f"{each!r} is a work of asynccoll already: await it as it is (together with adopted ones: "
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
    operation = Operation(
        beside, Estimate(f"adopted {what}"), 0, completion, caller(), limit, host.monotonic()
    )
    operation.ticket = _NO_TICKET
    return operation


class _Beside:
    """What stands where the lane of an operation does: nobody else takes part in what is adopted."""

    name = key = "none"
    epoch = 0

    def __init__(self, context: Context) -> None:
        self.communicator = self.group = self.world = _Around(context)

    def __str__(self) -> str:
        return "no lane"

    def explain_failure(self, operation: Operation, native: BaseException) -> CollectiveError:
        """The typed error for ``native``, which is its cause."""
        return collective_error(native, f"{operation.name} from {operation.place}")


class _Around:
    """The world of such an operation: that of the caller, which neither watches it nor is to blame."""

    def __init__(self, context: Context) -> None:
        self.timeout = context.timeout
        self.device = context.device
        self.recorder = context.recorder
        self.computed = context.computed

    def blame(self, operation: Operation) -> Blame:
        """Nobody: what it waits for is not known."""
        return Blame(operation.name, "", (), ())

    def dump(self) -> str:
        """Nothing is kept."""
        return ""

    def watch_over(self, operation: Operation) -> None:
        """Nothing to look at."""

    watch_no_more = watch_over

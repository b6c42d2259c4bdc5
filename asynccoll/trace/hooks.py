"""Custom metrics: a function that is called with every operation that is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from asynccoll import host
from asynccoll.host.misfits import check_function, fitting
from asynccoll.order.operation import Operation
from asynccoll.runtime.process import current
from asynccoll.trace.recorder import has_failed

_log = logging.getLogger("asynccoll.trace")


@dataclass(frozen=True, slots=True)
class Finished:
    """An operation of this rank that is over.

    ``operation`` is its name, ``lane`` its lane's name, ``ranks`` those of its group; ``started`` is by the
    monotonic clock, ``seconds`` is from the call to the end. ``place`` is the line of the call.
    """

    operation: str
    lane: str
    ranks: tuple[int, ...]
    sequence: int
    size_bytes: int
    started: float
    seconds: float
    place: str
    failed: bool


@fitting
def add_hook(finished: Callable[[Finished], object]) -> Callable[[], None]:
    """Call ``finished`` with every operation of this rank when it is over; returns a function to remove it.

    ``ac.finalize()`` removes it, too: add it again in the next world.

    ``finished`` is called by the thread that sees the end, so it must neither wait nor call collectives. An
    exception from it is logged, and has no other effect. Without hooks and recordings there is no cost.

    >>> remove = ac.trace.add_hook(lambda done: histogram.observe(done.seconds))

    Raises:
        NotInitializedError: under a launcher, before ``ac.initialize()``.
    """
    check_function("what add_hook calls", finished, "a function of what is finished")

    def observe(operation: Operation, size_bytes: int) -> None:
        operation.add_waker(lambda: _tell(finished, operation, size_bytes))

    return current().observe(observe)


def _tell(finished: Callable[[Finished], object], operation: Operation, size_bytes: int) -> None:
    lane = operation.lane
    done = Finished(
        operation.name,
        lane.name,
        tuple(lane.group.ranks),
        operation.sequence,
        size_bytes,
        operation.started,
        host.monotonic() - operation.started,
        str(operation.place),
        has_failed(operation),
    )
    try:
        finished(done)
    except Exception:  # a metric must not fail what it measures
        _log.exception("a hook on operations has raised; the operation %s is not affected", operation)

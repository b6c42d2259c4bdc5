"""Custom metrics: a function that is called with every operation that is over.

One such function is here: for OpenTelemetry, a span and two histogram values per operation, through the
program's own providers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from asynccoll import host
from asynccoll.errors import BackendNotFoundError
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


_NAME = "asynccoll"


def opentelemetry() -> Callable[[], None]:
    """Report every operation of this rank to OpenTelemetry; returns a function that stops this.

    Spans are named after the operation, and last from the call to its end; the histograms are
    ``asynccoll.operation.duration`` in seconds and ``asynccoll.operation.size`` in bytes. Attributes:
    ``asynccoll.operation``, ``.lane``, ``.ranks``, ``.sequence``, ``.bytes``, ``.failed``, ``code.location``.

    Raises:
        BackendNotFoundError: its API is missing; the text has the line that installs it.
    """
    try:
        from opentelemetry import metrics, trace
    except ImportError as error:
        raise BackendNotFoundError(
            "ac.trace.opentelemetry needs its API, which is not installed: pip install opentelemetry-api"
        ) from error
    tracer = trace.get_tracer(_NAME)
    meter = metrics.get_meter(_NAME)
    duration = meter.create_histogram("asynccoll.operation.duration", "s", "from the call to its end")
    size = meter.create_histogram("asynccoll.operation.size", "By", "bytes of this rank's tensor")

    def tell(done: Finished) -> None:
        kind = {"asynccoll.operation": done.operation, "asynccoll.lane": done.lane}
        duration.record(done.seconds, kind)
        size.record(done.size_bytes, kind)
        end = datetime.now(timezone.utc).timestamp() - (host.monotonic() - done.started - done.seconds)
        span = tracer.start_span(
            done.operation, attributes=_attributes(done), start_time=int((end - done.seconds) * 1e9)
        )
        if done.failed:
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        span.end(int(end * 1e9))

    return add_hook(tell)


def _attributes(done: Finished) -> dict[str, Any]:
    return {
        "asynccoll.operation": done.operation,
        "asynccoll.lane": done.lane,
        "asynccoll.ranks": done.ranks,
        "asynccoll.sequence": done.sequence,
        "asynccoll.bytes": done.size_bytes,
        "asynccoll.failed": done.failed,
        "code.location": done.place,
    }

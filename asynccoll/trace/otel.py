"""OpenTelemetry: a span and two histogram values per operation, through the program's own providers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from asynccoll import host
from asynccoll.errors import BackendNotFoundError
from asynccoll.trace.hooks import Finished, add_hook

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

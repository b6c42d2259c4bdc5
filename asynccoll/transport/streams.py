"""Device streams: how one stream is ordered after another, and how a thread issues calls on a given stream.

An operation that is ordered by a stream (nccl) is ready once it has been issued, before the device has run
it. ``waiting.synchronizing`` makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def recorded(device: torch.device) -> Any:
    """Record an event on the current stream and return it. A host thread sleeps while it waits for it."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def order_after(event: Any, device: torch.device) -> None:
    """Order the current stream of ``device`` after ``event``."""
    torch.cuda.current_stream(device).wait_event(event)


class Mark:
    """A point on the current stream, taken when the mark is made; other streams can be ordered after it."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = recorded(device)

    def order(self) -> None:
        """Order the current stream after the mark."""
        order_after(self._event, self._device)


def current() -> torch.cuda.Stream | None:
    """Return this thread's current stream; None if the process has not used a GPU yet."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if used else None


def on_stream(
    stream: torch.cuda.Stream | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call ``function`` with ``stream``, and its device, current; without a stream, just call it."""
    if stream is None:
        return function(*args, **kwargs)
    with torch.cuda.stream(stream):
        return function(*args, **kwargs)


def carried(job: Callable[[], T]) -> Callable[[], T]:
    """Bind ``job`` to the stream that is current here, so that another thread runs it on that stream."""
    stream = current()
    return job if stream is None else lambda: on_stream(stream, job)

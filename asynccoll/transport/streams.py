"""Device streams: what is done for the host while the device is behind.

An operation that is ordered by a stream (nccl) is ready when it has been issued. What follows is here: how
a second stream is ordered after a result, and on which stream another thread issues a call. How the host
waits for the device is in ``waiting.synchronizing``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Mark", "carried", "current", "on_stream", "order_after", "recorded"]

P = ParamSpec("P")
T = TypeVar("T")


def recorded(device: torch.device) -> Any:
    """An event recorded on the current stream; the host sleeps while it waits for it."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def order_after(event: Any, device: torch.device) -> None:
    """Order the current stream after it."""
    torch.cuda.current_stream(device).wait_event(event)


class Mark:
    """A place on the stream that is current where it is made; other streams can be ordered after it."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = recorded(device)

    def order(self) -> None:
        """Order the current stream after it."""
        order_after(self._event, self._device)


def current() -> torch.cuda.Stream | None:
    """The current stream of this thread; None where the process has not used a device."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if used else None


def on_stream(
    stream: torch.cuda.Stream | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """``function``'s result, with ``stream`` (and its device) as the current one."""
    if stream is None:
        return function(*args, **kwargs)
    with torch.cuda.stream(stream):
        return function(*args, **kwargs)


def carried(job: Callable[[], T]) -> Callable[[], T]:
    """``job``, which another thread will run on the stream that is current here."""
    stream = current()
    return job if stream is None else lambda: on_stream(stream, job)

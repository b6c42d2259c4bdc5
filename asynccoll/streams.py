"""Device streams and the host: ``on_host`` for backends whose works are ordered by a stream."""

from __future__ import annotations

from typing import Any

import torch

from asynccoll.backends.waiters import Waiters
from asynccoll.waiting import Signal

__all__ = ["drained"]

_waiter = Waiters("asynccoll-stream")


async def drained(device: torch.device) -> None:
    """Wait, without holding the event loop, until the device has done all that its current stream holds."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    if event.query():
        return
    signal = Signal()
    _waiter.submit(event, lambda: _wait(event, signal))
    await signal.wait()


def _wait(event: Any, signal: Signal) -> None:
    # A blocking event sleeps in the driver: no spinning, and the GIL is free.
    event.synchronize()
    signal.set()

"""The device of a simulated rank, if its transport has one: what was launched there, and its events.

It has only one stream and computes nothing: all that lags behind the host are calls of the transport.
"""

from __future__ import annotations

import math
from typing import Any

from asynccoll.backends.api import Promise
from asynccoll.testing.scheduler import running

__all__ = ["Device", "devices", "order_after", "recorded"]


class Device:
    """The calls that a device has not completed yet."""

    def __init__(self, patience_seconds: float) -> None:
        #: after which torch's own watchdog aborts a call that is still in flight
        self.patience_seconds = patience_seconds
        self._launched: list[Promise] = []

    def launch(self, promise: Promise) -> None:
        self._launched = [one for one in self._launched if not one.done()]
        self._launched.append(promise)

    def event(self) -> Event:
        """Return an event after everything that was launched so far."""
        return Event(tuple(self._launched))


class Event:
    """A simulated ``torch.cuda.Event``."""

    def __init__(self, before: tuple[Promise, ...]) -> None:
        self._before = before

    def query(self) -> bool:
        for one in self._before:
            if one.done() and (error := one.error()) is not None:
                raise RuntimeError(str(error))  # as the failure of a kernel is reported
        return all(one.done() for one in self._before)

    def synchronize(self) -> None:
        for one in self._before:
            one.wait(math.inf)
        self.query()


#: The devices of the running simulation, by rank.
devices: list[Device] = []


def recorded(device: object) -> Event:
    """Simulate ``streams.recorded``."""
    scheduler = running()
    assert scheduler is not None and scheduler.current is not None
    return devices[scheduler.current.rank].event()


def order_after(event: Any, device: object) -> None:
    """Simulate ``streams.order_after``. This thread computes what comes next, so it waits itself."""
    for one in event._before:
        one.wait(math.inf)

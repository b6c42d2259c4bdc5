"""The device of a simulated rank, if its transport has one: what was launched there, and its events.

There is no other stream, and nothing is computed there: what is behind are calls of the transport.
"""

from __future__ import annotations

import math
from typing import Any

from asynccoll.backends.api import Promise
from asynccoll.testing.scheduler import running

__all__ = ["Device", "devices", "order_after", "recorded"]


class Device:
    """What it has not done yet."""

    def __init__(self, patience_seconds: float) -> None:
        #: after which torch's own watchdog aborts what is still out there
        self.patience_seconds = patience_seconds
        self._launched: list[Promise] = []

    def launch(self, promise: Promise) -> None:
        self._launched = [one for one in self._launched if not one.done()]
        self._launched.append(promise)

    def event(self) -> Event:
        """A place after all that was launched so far."""
        return Event(tuple(self._launched))


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, before: tuple[Promise, ...]) -> None:
        self._before = before

    def query(self) -> bool:
        for one in self._before:
            if one.done() and (error := one.error()) is not None:
                raise RuntimeError(str(error))  # as a kernel's failure is heard of
        return all(one.done() for one in self._before)

    def synchronize(self) -> None:
        for one in self._before:
            one.wait(math.inf)
        self.query()


#: Those of the ranks of the simulation that runs.
devices: list[Device] = []


def recorded(device: object) -> Event:
    """As ``streams.recorded``."""
    scheduler = running()
    assert scheduler is not None and scheduler.current is not None
    return devices[scheduler.current.rank].event()


def order_after(event: Any, device: object) -> None:
    """As ``streams.order_after``: what is computed next is computed by this thread."""
    for one in event._before:
        one.wait(math.inf)

"""A call in flight as its waiter sees it: a ``Completion`` that is moved through memory (``moving``)."""

from __future__ import annotations

from typing import Protocol

from asynccoll.backends.api import Callback, Completion

__all__ = ["Carrier", "InFlight"]


class Carrier(Protocol):
    """What carries calls, as one of them needs it (``moving.Mover``)."""

    def poke(self) -> None:
        """Move what can be moved now."""

    def wait(self, call: InFlight, seconds: float) -> bool:
        """Move until that call is over, or so many seconds have passed; whether it is over."""
        ...

    def listen(self, call: InFlight, callback: Callback) -> None:
        """Call ``callback`` when that call is over."""


class InFlight(Completion):
    """One call."""

    __slots__ = ("_carrier", "_error", "callbacks", "fine", "finished")

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._error: BaseException | None = None
        self.finished: bool = False
        self.fine = False
        self.callbacks: list[Callback] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """It is over. Callbacks are called where that is allowed."""
        self._error = error
        self.fine: bool = error is None
        self.finished = True

    # What waiters ask for

    def done(self) -> bool:
        # A callback may take locks that the caller holds: with any, only a waiter or the watcher ends it.
        if not self.finished and self.callbacks is None:
            self._carrier.poke()
        return self.finished

    def wait(self, seconds: float) -> bool:
        if self.finished:
            return True
        return self._carrier.wait(self, seconds)

    def add_callback(self, callback: Callback) -> None:
        if not self.finished:
            self._carrier.listen(self, callback)
        else:
            callback()

    def error(self) -> BaseException | None:
        return self._error

    def writing(self) -> bool:
        return not self.finished

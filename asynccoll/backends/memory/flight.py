"""A call in flight as its waiter sees it: a ``Completion`` that threads carry forward (``moving``)."""

from __future__ import annotations

from typing import Protocol

from asynccoll.backends.api import Callback, Completion


class Carrier(Protocol):
    """What a call needs of the ``moving.Mover`` that carries it."""

    def poke(self) -> None:
        """Move what can be moved now."""

    def wait(self, call: InFlight, seconds: float) -> bool:
        """Move calls until ``call`` is over or the time has passed; return whether it is over."""

    def listen(self, call: InFlight, callback: Callback) -> None:
        """Call ``callback`` when ``call`` is over."""


class InFlight(Completion):
    """One call, or message, that a ``Carrier`` moves until it is ended."""

    __slots__ = ("_carrier", "_error", "callbacks", "fine", "finished")

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._error: BaseException | None = None
        self.finished: bool = False
        self.fine = False
        self.callbacks: list[Callback] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """End the call. Its carrier calls the callbacks later, without its lock."""
        self._error = error
        self.fine: bool = error is None
        self.finished = True

    # What waiters ask for

    def done(self) -> bool:
        # A callback may take locks that the caller holds. So a call with callbacks is not moved here, but by
        # waiters and the watcher.
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

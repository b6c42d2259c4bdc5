"""What a method that waits several times returns: ``await`` it, or call ``wait()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from asynccoll.errors import InvalidArgumentError, UnawaitedWorkWarning
from asynccoll.host.call_site import Spot, caller
from asynccoll.overlap.steps import Resumable, Steps, run, run_blocking
from asynccoll.waiting.forgotten import NotItsResult

__all__ = ["Methods", "Pending"]

T = TypeVar("T")


class Pending(NotItsResult, Generic[T]):
    """A step of an optimizer, say: it begins when it is waited for, and its result is the method's.

    - ``await pending``, on asyncio or trio, or ``pending.wait()`` without an event loop. Later waits get the
      same result; one after a cancelled or timed-out wait goes on with what is left.
    - Never waited for, it has done nothing: it warns (``UnawaitedWorkWarning``) when it is dropped, and the
      next call on its object raises ``InvalidArgumentError``. Both name the line.
    """

    __slots__ = ("__weakref__", "_begin", "_begun", "_called", "_is_told", "_methods", "_result", "_spot")

    def __init__(self, methods: Methods, called: str, begin: Callable[[], Steps[T]]) -> None:
        """``called``: the method, as a user writes it."""
        self._begun = self._is_told = False
        self._methods = methods
        self._called = called
        self._begin = begin
        self._result: tuple[T] | None = None
        self._spot: Spot = caller()

    def __repr__(self) -> str:
        state = "done" if self._result is not None else "begun" if self._begun else "not begun"
        return f"<{self._called} at {self._spot.place}: {state}>"

    def __await__(self) -> Generator[object, object, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        self._begun = True
        if self._result is None:
            self._result = (await run(self._begin()),)
        return self._result[0]

    def wait(self) -> T:
        """The same without an event loop."""
        self._begun = True
        if self._result is None:
            self._result = (run_blocking(self._begin()),)
        return self._result[0]

    def _told(self) -> None:
        self._is_told = True

    def __del__(self) -> None:
        if self._begun:
            return
        place = self._spot.place
        told = f"{self._called} at {place} was never awaited, and has done nothing: await it, or call wait()"
        self._methods.forgotten = told
        if self._is_told:
            return
        try:
            warnings.warn_explicit(told, UnawaitedWorkWarning, place.file, place.line)
        except BaseException:  # warnings turned into errors, or an interpreter that is shutting down
            import sys

            if sys is not None and sys.unraisablehook is not None:
                raise


class Methods(Resumable):
    """The methods of one object that return a ``Pending``."""

    def __init__(self, of: str, whose: str, news: Callable[[], object] = lambda: None) -> None:
        """``of``: the object's class."""
        super().__init__(whose, news)
        self._of = of
        #: of a call that nobody waited for, what to tell
        self.forgotten: str = ""

    def resumed(self, name: tuple[object, ...], begin: Callable[[], Steps[T]]) -> Pending[T]:
        """The waits of the method with these arguments, or what was left of them."""
        return self.pending(name[0], lambda: self.steps(name, begin))

    def pending(self, name: object, begin: Callable[[], Steps[T]]) -> Pending[T]:
        """The waits of the method, which goes on by itself where it was left."""
        told, self.forgotten = self.forgotten, ""
        if told:  # the other ranks are a step ahead, or all of them have left it out
            raise InvalidArgumentError(told)
        return Pending(self, f"{self._of}.{name}()", begin)

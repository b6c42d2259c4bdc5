"""Sequences of waits, driven with an event loop or without one, and resumed where they were cut short."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Protocol, TypeVar

from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError

__all__ = ["Resumable", "Steps", "Waitable", "run", "run_blocking"]

T = TypeVar("T")


class Waitable(Awaitable[object], Protocol):
    """What can be awaited, and waited for without a loop: a ``Work``, or what imitates one."""

    def wait(self) -> object:
        """Its result, without an event loop."""


#: Yields what is to be waited for, gets its result back, and returns the result of the whole.
Steps = Generator[Waitable, Any, T]


async def run(steps: Steps[T]) -> T:
    """The result of ``steps``, each wait of which suspends the task."""
    try:
        waited_for = next(steps)
        while True:
            try:
                result = await waited_for
            except Exception as error:
                waited_for = steps.throw(error)
            else:
                waited_for = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration is not generic
    finally:
        steps.close()


def run_blocking(steps: Steps[T]) -> T:
    """The same, each wait of which blocks the thread."""
    try:
        waited_for = next(steps)
        while True:
            try:
                result = waited_for.wait()
            except Exception as error:
                waited_for = steps.throw(error)
            else:
                waited_for = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration is not generic
    finally:
        steps.close()


class Resumable:
    """Runs the sequences of one object in the order in which they are asked for, though waits are cut short.

    Other ranks go through the whole of a sequence of which this one's wait was cancelled or timed out, so
    this one has to as well, once. Asked for it again, the rest of it is run, and its result is the caller's.
    Asked for another one, the rest is run first, as on a rank where nothing was cut short. ``news`` changes
    when something has come to the object that makes the same call another one: new gradients, say.
    """

    def __init__(self, whose: str, news: Callable[[], object] = lambda: None) -> None:
        self._whose = whose
        self._news = news
        self._left_at = news()
        self._left: deque[_Sequence] = deque()

    def steps(self, name: tuple[object, ...], begin: Callable[[], Steps[T]]) -> Steps[T]:
        """The sequence of that method and its arguments, from where it was left or from the start."""
        self._check_idle()
        resumed = self._left and self._left[-1].name == name and self._left_at == self._news()
        if not resumed:
            self._left.append(_Sequence(name, begin()))
        return (yield from self.rest())  # type: ignore[no-any-return]  # of the last one, which is of that name

    def rest(self) -> Steps[Any]:
        """What is left of all sequences; the result of the last."""
        result = None
        while self._left:
            first = self._left[0]
            try:
                result = yield from first.rest()
            finally:
                self._left_at = self._news()
                if first.over:
                    self._left.popleft()
        return result

    def check_complete(self, wanted: str) -> None:
        """Refuse ``wanted``, which waits for nothing, while a sequence is left in the middle."""
        if self._left:
            raise InvalidArgumentError(
                f"{wanted} after a wait of {self._whose} was cut short, which the other ranks complete: "
                f"call {self._left[-1].called} again first"
            )

    def _check_idle(self) -> None:
        if self._left and self._left[0].waited_for:
            raise InvalidArgumentError(
                f"another task waits in {self._left[0].called} of {self._whose}: ranks whose tasks take "
                "turns in another order would mix the parts of both. Use it from one task at a time"
            )


class _Sequence:
    """Steps of which the wait that was cut short is kept."""

    def __init__(self, name: tuple[object, ...], steps: Steps[object]) -> None:
        self.name = name
        self.over = False
        self.waited_for = False
        self._steps = steps
        self._pending: Waitable | None = None
        self._result: object = None

    @property
    def called(self) -> str:
        """The method that it is of."""
        return f"{self.name[0]}()"

    def rest(self) -> Steps[Any]:
        """What is left of it. If this is closed in a wait, the next one begins with that."""
        self.waited_for = True
        try:
            while True:
                if self._pending is None:
                    self._pending = self._next(partial(self._steps.send, self._result))
                try:
                    self._result = yield self._pending
                except CollectiveTimeoutError:
                    raise  # what it waits for is in flight still
                except Exception as error:
                    self._pending = self._next(partial(self._steps.throw, error))
                else:
                    self._pending = None
        except StopIteration as stop:  # of ``_next``
            return stop.value
        finally:
            self.waited_for = False

    def _next(self, go_on: Callable[[], Waitable]) -> Waitable:
        try:
            return go_on()
        except BaseException:
            self.over = True
            raise

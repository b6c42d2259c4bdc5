"""Sequences of waits, run with or without an event loop, and resumed if a wait was cut short.

A method with several waits is written once, as a generator that yields what to wait for (``Steps``). A wait
is *cut short* if it is cancelled, or times out while the operation is in flight (``still_pending``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Protocol, TypeVar

from asynccoll import host
from asynccoll.errors import InvalidArgumentError, still_pending

__all__ = ["Resumable", "Sequence", "Steps", "Waitable", "run", "run_blocking"]

T = TypeVar("T")

_CUT_OFF = (
    "Ctrl-C came while {called} of {whose} was computing, not waiting, so it is unknown what it had changed "
    "by then, and which of its calls the other ranks can complete: end this rank, or make another one on "
    "every rank, and go on from a checkpoint"
)


class Waitable(Awaitable[object], Protocol):
    """An object that can be awaited, or waited for without a loop: a ``Work``, or one like it."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait without an event loop, for up to ``timeout`` seconds, and return the result."""


#: Yields objects to wait for, is sent their results, and returns the result of the sequence.
Steps = Generator[Waitable, Any, T]


async def run(steps: Steps[T]) -> T:
    """Run ``steps``, suspending the task in each wait, and return their result."""
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


def run_blocking(steps: Steps[T], timeout: float | None = None) -> T:
    """Run ``steps``, blocking the thread for up to ``timeout`` seconds in all; return their result."""
    ends = None if timeout is None else host.monotonic() + timeout
    try:
        waited_for = next(steps)
        while True:
            try:
                result = waited_for.wait(None if ends is None else ends - host.monotonic())
            except Exception as error:
                waited_for = steps.throw(error)
            else:
                waited_for = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration is not generic
    finally:
        steps.close()


class Resumable:
    """Runs the sequences of one object in the order of the calls, even if waits are cut short.

    If a wait of this rank is cut short, the other ranks still complete that sequence, so this rank has to as
    well, exactly once. If the same method is called again, the rest of the sequence runs, and the caller gets
    its result. If another method is called, the rest runs first, as on a rank whose waits were not cut short.
    ``news()`` changes when the same call means a new sequence: when there are new gradients, say.
    """

    def __init__(self, whose: str, news: Callable[[], object] = lambda: None) -> None:
        self._whose = whose
        self._news = news
        self._left_at = news()
        self._left: deque[Sequence] = deque()

    def called(self, name: tuple[object, ...], begin: Callable[[], Steps[object]]) -> Sequence:
        """Return the latest sequence if it has this ``name`` and was cut short, else a new one.

        ``name``: a method and its arguments.
        """
        self._check_idle()
        news = self._news()
        resumed = self._left and self._left[-1].name == name and self._left_at == news
        if not resumed:
            sequence = Sequence(name, begin, self._whose)
            # Without a call in between: if Ctrl-C comes after both, the next call continues the sequence.
            self._left_at = news
            self._left.append(sequence)
        return self._left[-1]

    def through(self, sequence: Sequence) -> Steps[Any]:
        """Run all remaining steps up to the end of ``sequence``, which may be over; return its result."""
        if not sequence.over:
            self._check_idle()
        while not sequence.over:
            yield from self._first()
        self._drop_ended()
        return sequence.outcome()

    def rest(self) -> Steps[None]:
        """Run the rest of all sequences, except of one that was cut off."""
        while self._left and not self._left[0].cut_off:
            yield from self._first()

    def _first(self) -> Steps[None]:
        first = self._left[0]
        try:
            yield from first.rest()
        finally:
            self._left_at = self._news()
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Drop sequences that are over. Ctrl-C may keep one from being dropped as it ends."""
        while self._left and self._left[0].over:
            self._left.popleft()

    def check_complete(self, wanted: str) -> None:
        """Refuse ``wanted``, which waits for nothing, while a sequence is not complete."""
        if self._left:
            self._left[0].check_whole()
            raise InvalidArgumentError(
                f"{wanted} after a wait of {self._whose} was cut short, while the other ranks complete it: "
                f"call {self._left[-1].called} again first"
            )

    @property
    def is_waited_for(self) -> bool:
        """Whether a sequence of this object is being waited for now."""
        return bool(self._left) and self._left[0].waited_for

    def _check_idle(self) -> None:
        if self._left:
            self._left[0].check_whole()
        if self.is_waited_for:
            raise InvalidArgumentError(
                f"another task waits in {self._left[0].called} of {self._whose}: if tasks take turns in "
                "another order on another rank, the parts of both are mixed up. Use it from one task at a "
                "time"
            )


class Sequence:
    """Steps that remember what they wait for if the wait is cut short, and their result or error.

    A wait can be cut short and continued, but not the steps' own code, which Ctrl-C ends for good: then they
    are *cut off*, and how much of them was done is unknown.
    """

    def __init__(self, name: tuple[object, ...], begin: Callable[[], Steps[object]], whose: str) -> None:
        self.name: tuple[object, ...] = name
        self.over: bool = False
        #: if it was cut off, the error text that says so
        self.cut_off: str = ""
        self.waited_for: bool = False
        self._steps = begin()
        self._whose = whose
        self._pending: Waitable | None = None
        self._result: object = None
        self._error: Exception | None = None

    def outcome(self) -> Any:
        """Return the result of the steps, which are over, or raise their error."""
        if self._error is not None:
            raise self._error
        return self._result

    def check_whole(self) -> None:
        """Raise an error if it was cut off: it can neither be continued nor run again."""
        if self.cut_off:
            raise InvalidArgumentError(self.cut_off)

    @property
    def is_running(self) -> bool:
        """Whether its own code is running now, not a wait."""
        return self.waited_for and self._pending is None

    @property
    def called(self) -> str:
        """The method that runs it, as in ``step()``."""
        return f"{self.name[0]}()"

    def rest(self) -> Steps[None]:
        """Run the rest of the sequence. If this is closed in a wait, the next call begins with that wait."""
        self.waited_for = True
        try:
            while True:
                if self._pending is None:
                    self._pending = self._next(partial(self._steps.send, self._result))
                try:
                    self._result = yield self._pending
                except Exception as error:
                    if still_pending(error):
                        raise
                    self._pending = self._next(partial(self._steps.throw, error))
                else:
                    self._pending = None
        except StopIteration as stop:  # from ``_next``: the steps have ended
            self._result = stop.value
        finally:
            self.waited_for = False

    def _next(self, go_on: Callable[[], Waitable]) -> Waitable:
        try:
            return go_on()
        except Exception as error:
            self.over = True
            self._error = None if isinstance(error, StopIteration) else error
            raise
        except BaseException:  # Ctrl-C, or the end of the program in a closure
            self.cut_off = _CUT_OFF.format(called=self.called, whose=self._whose)
            raise

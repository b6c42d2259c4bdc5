"""How a program that ends leaves its worlds: no process stays behind because a script ended or died.

Python ends in two steps. First the main thread ends, and every other thread that is not a daemon is joined,
those of pools among them: a thread that waits for a peer which never calls would hold the process for the
whole timeout. Only then the exit hooks run. So a thread of ours watches from the first step on: other threads
go on, but each of their operations gets only ``EXIT_SECONDS``, like work in flight when a script ends.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook, which joins pools, must be registered before ours
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from asynccoll.host.each import call_each
from asynccoll.host.endings import in_a_line
from asynccoll.host.words import plural

__all__ = ["EXIT_SECONDS", "died_of", "dies_of", "in_main_thread", "install"]

#: How long a script that ends with work in flight may take to let it finish.
EXIT_SECONDS = 10.0
_LOOK_SECONDS = 0.1
#: Of more that are in flight at the end, their number is told.
_MOST_TOLD = 3


class Stuck(Protocol):
    """An operation that is in flight."""

    started: float  # by the monotonic clock


class Open(Protocol):
    """A world that is open when the program ends."""

    rank: int

    def say_ended(self, how: str, why: str, code: int | None) -> None:
        """Write down, where its peers can read it, that its program ends."""

    def outstanding(self) -> Sequence[Stuck]:
        """The operations that are not done."""

    def drain(self, seconds: float) -> Sequence[Stuck]:
        """Wait up to ``seconds`` for the operations in flight; returns those that are not done then."""

    def close(self, *, abort: bool, patience: float) -> None:
        """Leave the world."""


W = TypeVar("W", bound=Open)


class _Ending(Generic[W]):
    """Leaves this process's worlds when it ends.

    ``worlds`` gives those that are open; ``forget`` is called with each one after it was left.
    """

    def __init__(self, worlds: Callable[[], list[W]], forget: Callable[[W], None]) -> None:
        self._worlds = worlds
        self._forget = forget
        self._over = threading.Event()
        self._guard: threading.Thread | None = None
        self.died_of = ""  # as text: the exception would keep what its frames hold

    def main_thread_ended(self) -> None:
        """Called before other threads are joined: leave at once if the program died, else watch over them."""
        if (error := _uncaught()) is not None:
            self.died_of = in_a_line(error)
            self.leave()
        elif self._worlds():
            self._guard = threading.Thread(target=self._watch, name="asynccoll-exit", daemon=True)
            self._guard.start()

    def _watch(self) -> None:
        """Abort each world that has had an operation in flight for ``EXIT_SECONDS`` since the end began."""
        began = monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            late = monotonic() - EXIT_SECONDS
            for context in self._worlds():
                stuck = [one for one in context.outstanding() if max(began, one.started) <= late]
                if stuck:
                    self._abort(context, stuck)

    def leave(self) -> None:
        """Let work in flight finish, or abort it if it does not or the program died, and leave all worlds."""
        self._over.set()
        if self._guard is not None:
            self._guard.join()  # what it does is bounded in time, and Python must not end while it runs
        call_each(partial(self._leave, context) for context in self._worlds())

    def _leave(self, context: W) -> None:
        out, abort = context.outstanding(), True  # also if Ctrl-C ends the wait
        try:
            if not _died():  # also with nothing in flight: peers may have to hear of a call that was refused
                out = context.drain(EXIT_SECONDS)
                abort = bool(out)
        finally:
            if abort:
                self._abort(context, out)
            else:
                self._close(context, abort=False)

    def _abort(self, context: W, out: Sequence[Stuck]) -> None:
        if out:
            told = "; ".join(repr(one) for one in out[:_MOST_TOLD])
            more = f"; and {len(out) - _MOST_TOLD} more" if len(out) > _MOST_TOLD else ""
            print(  # noqa: T201  # the program is over: there is nobody left to raise to
                f"asynccoll: rank {context.rank} ends with {plural(len(out), 'operation')} in flight, "
                f"aborted: {told}{more}",
                file=sys.stderr,
            )
        self._close(context, abort=True)

    def _close(self, context: W, *, abort: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context.say_ended(*_how())
            try:
                context.close(abort=abort, patience=EXIT_SECONDS)
            finally:
                self._forget(context)


def _died() -> bool:
    """Whether an uncaught exception ends the program."""
    return _uncaught() is not None


def _uncaught() -> BaseException | None:
    return getattr(sys, "last_value", None)


def _how() -> tuple[str, str, int | None]:
    """How the program ends, the error that it ends with, and its exit code, as far as known from inside."""
    error = _uncaught()
    if error is not None:
        return "died", in_a_line(error), 1
    return "ended", "", exit_code


#: The code that this process ends with, once known: ``launch.child``, which runs the program and catches
#: ``SystemExit``, sets it.
exit_code: int | None = None

_endings: list[_Ending[Any]] = []
_register: Any = getattr(threading, "_register_atexit", None)  # what concurrent.futures uses, by this name


def died_of() -> str:
    """The uncaught exception that ends this process, in a line, once its main thread has ended; else ""."""
    return _endings[0].died_of if _endings else ""


def dies_of(error: BaseException) -> None:
    """This process is about to end on account of ``error``: to who runs the program and catches it."""
    for ending in _endings:
        ending.died_of = in_a_line(error)


def install(worlds: Callable[[], list[W]], forget: Callable[[W], None]) -> None:
    """Leave the worlds when this process ends; called again, do so before exit hooks registered since."""
    if not _endings:
        _endings.append(_Ending(worlds, forget))
        if _register is not None:
            _register(_endings[0].main_thread_ended)
    # Registered anew each time: hooks run last in, first out, and this one must run before those of the
    # libraries that it closes.
    atexit.unregister(_endings[0].leave)
    atexit.register(_endings[0].leave)


def in_main_thread() -> bool:
    """Whether the caller runs in the main thread, in which handlers of signals raise."""
    return threading.current_thread() is threading.main_thread()

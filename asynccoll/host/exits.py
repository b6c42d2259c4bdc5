"""How a program that ends leaves its worlds: no process stays behind because a script ended or died.

Python exits in two steps. First the main thread ends, and every other non-daemon thread is joined, including
those of pools: a thread that waits for a peer that never calls would keep the process alive for the whole
timeout. Only then do the exit hooks run. So a thread of this library watches from the first step on: other
threads continue, but each of their operations gets only ``EXIT_SECONDS``, like work in flight when a script
ends.
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
from asynccoll.host.helpers import Helpers
from asynccoll.host.words import plural

#: How long a script that ends with work in flight may wait for that work to finish.
EXIT_SECONDS = 10.0
_LOOK_SECONDS = 0.1
#: How many operations in flight at the end are listed; the rest are only counted.
_MOST_TOLD = 3


class Stuck(Protocol):
    """An operation that is in flight."""

    started: float  # by the monotonic clock


class Open(Protocol):
    """A world that is open when the program ends."""

    rank: int

    def say_ended(self, how: str, why: str, code: int | None) -> None:
        """Record, where its peers can read it, that its program ends."""

    def outstanding(self) -> Sequence[Stuck]:
        """The operations that are not done."""

    def drain(self, seconds: float) -> Sequence[Stuck]:
        """Wait up to ``seconds`` for the operations in flight. Returns those that are not done by then."""

    def close(self, *, abort: bool, patience: float) -> None:
        """Leave the world."""


W = TypeVar("W", bound=Open)


class _Ending(Generic[W]):
    """The end of this process, at which it leaves its worlds.

    ``worlds`` returns the open worlds; ``forget`` is called with each world after it was left.
    """

    def __init__(self, worlds: Callable[[], list[W]], forget: Callable[[W], None]) -> None:
        self._worlds = worlds
        self._forget = forget
        self._over = threading.Event()
        self._guard: threading.Thread | None = None
        self.died_of = ""  # as text: the exception would keep alive what its frames hold

    def main_thread_ended(self) -> None:
        """Leave now if the program died; else watch the other threads. Called before they are joined."""
        if (error := _uncaught()) is not None:
            self.died_of = in_a_line(error)
            self.leave()
        elif self._worlds():
            self._guard = Helpers().start("asynccoll-exit", self._watch)

    def _watch(self) -> None:
        """Abort each world that has had an operation in flight for ``EXIT_SECONDS`` since the exit began."""
        began = monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            late = monotonic() - EXIT_SECONDS
            for context in self._worlds():
                stuck = [one for one in context.outstanding() if max(began, one.started) <= late]
                if stuck:
                    self._abort(context, stuck)

    def leave(self) -> None:
        """Leave all worlds: let work in flight finish, or abort it if it does not or the program died."""
        self._over.set()
        if self._guard is not None:
            self._guard.join()  # takes a bounded time, and Python must not end while the thread runs
        call_each(partial(self._leave, context) for context in self._worlds())

    def _leave(self, context: W) -> None:
        out, abort = context.outstanding(), True  # also if Ctrl-C ends the wait
        try:
            if not _died():  # even with nothing in flight: peers may still have to learn of a refused call
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
            print(  # noqa: T201  # the program is over: there is no caller left to raise to
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
    """Whether the program ends with an uncaught exception."""
    return _uncaught() is not None


def _uncaught() -> BaseException | None:
    return getattr(sys, "last_value", None)


def _how() -> tuple[str, str, int | None]:
    """Return how the program ends, its error, and its exit code, as far as the process itself knows."""
    error = _uncaught()
    if error is not None:
        return "died", in_a_line(error), 1
    return "ended", "", exit_code


#: The exit code of this process, once known. ``launch.child``, which runs the program and catches
#: ``SystemExit``, sets it.
exit_code: int | None = None

_endings: list[_Ending[Any]] = []
_register: Any = threading._register_atexit  # type: ignore[attr-defined]  # private; as concurrent.futures does


def died_of() -> str:
    """Return, in one line, the uncaught exception that ended the main thread; "" while there is none."""
    return _endings[0].died_of if _endings else ""


def dies_of(error: BaseException) -> None:
    """Note that this process is about to end with ``error``, which the code that runs the program catches."""
    for ending in _endings:
        ending.died_of = in_a_line(error)


def install(worlds: Callable[[], list[W]], forget: Callable[[W], None]) -> None:
    """Leave the worlds when this process ends. Call again to run before exit hooks registered since."""
    if not _endings:
        _endings.append(_Ending(worlds, forget))
        try:
            _register(_endings[0].main_thread_ended)
        except RuntimeError:  # it has ended: another thread makes the first world
            _endings[0].main_thread_ended()
    # Registered again each time: hooks run last in, first out, and this one must run before those of the
    # libraries that it closes.
    atexit.unregister(_endings[0].leave)
    atexit.register(_endings[0].leave)


def in_main_thread() -> bool:
    """Whether the caller runs in the main thread, where signal handlers raise."""
    return threading.current_thread() is threading.main_thread()

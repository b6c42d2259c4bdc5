"""How a program that ends leaves its worlds: no process stays behind because a script ended or died.

Python ends in two steps. First the main thread ends, and every other thread that is not a daemon is joined,
those of pools among them: one that waits for a peer that never comes would hold the process for the whole
timeout. Only then the exit hooks run. So the end is watched from the first step on: what other threads do
goes on, but each of their operations has so long as a script has that ends with work in flight.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook, which joins pools, must be registered before ours
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from asynccoll.host.endings import in_a_line

__all__ = ["EXIT_SECONDS", "install"]

#: How long a script that ends with work in flight may take to let it finish.
EXIT_SECONDS = 10.0
_LOOK_SECONDS = 0.1


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
        """Wait up to ``seconds`` for them; those that are still out then."""

    def close(self, *, abort: bool, patience: float) -> None:
        """Leave it."""


W = TypeVar("W", bound=Open)


class _Ending(Generic[W]):
    """The end of this process. ``worlds`` gives those that are open; ``forget`` hears of each one left."""

    def __init__(self, worlds: Callable[[], list[W]], forget: Callable[[W], None]) -> None:
        self._worlds = worlds
        self._forget = forget
        self._over = threading.Event()
        self._guard: threading.Thread | None = None

    def main_thread_ended(self) -> None:
        """Before other threads are joined."""
        if _died():
            self.leave()
        elif self._worlds():
            self._guard = threading.Thread(target=self._watch, name="asynccoll-exit", daemon=True)
            self._guard.start()

    def _watch(self) -> None:
        began = monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            late = monotonic() - EXIT_SECONDS
            for context in self._worlds():
                stuck = [one for one in context.outstanding() if max(began, one.started) <= late]
                if stuck:
                    self._abort(context, stuck)

    def leave(self) -> None:
        """Let work finish, or abort it."""
        self._over.set()
        if self._guard is not None:
            self._guard.join()  # whatever it does has a bound, and Python must not end under it
        for context in self._worlds():
            out = context.outstanding()
            if not _died():  # also with nothing in flight: peers may have to hear of a call that was refused
                out = context.drain(EXIT_SECONDS)
            if out or _died():
                self._abort(context, out)
            else:
                self._close(context, abort=False)

    def _abort(self, context: W, out: Sequence[Stuck]) -> None:
        if out:
            many = "s" * (len(out) > 1)
            print(  # noqa: T201  # the program is over: there is nobody left to raise to
                f"asynccoll: rank {context.rank} ends with {len(out)} operation{many} in flight, "
                f"aborted: {out[0]!r}",
                file=sys.stderr,
            )
        self._close(context, abort=True)

    def _close(self, context: W, *, abort: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context.say_ended(*_how())
            context.close(abort=abort, patience=EXIT_SECONDS)
        self._forget(context)


def _died() -> bool:
    """Whether an uncaught exception ends the program."""
    return _uncaught() is not None


def _uncaught() -> BaseException | None:
    return getattr(sys, "last_value", None)


def _how() -> tuple[str, str, int | None]:
    """How the program ends, of what, and with which exit code, as far as that is known from inside."""
    error = _uncaught()
    if error is not None:
        return "died", in_a_line(error), 1
    return "ended", "", exit_code


#: With which code this process ends, where that is known: to who runs the program and catches ``SystemExit``.
exit_code: int | None = None

_endings: list[_Ending[Any]] = []
_register: Any = getattr(threading, "_register_atexit", None)  # what concurrent.futures uses, by this name


def install(worlds: Callable[[], list[W]], forget: Callable[[W], None]) -> None:
    """See to the end of this process; called again, go before the exit hooks registered meanwhile."""
    if not _endings:
        _endings.append(_Ending(worlds, forget))
        if _register is not None:
            _register(_endings[0].main_thread_ended)
    # Anew each time: hooks run last in, first out, and this one goes before those of what it closes.
    atexit.unregister(_endings[0].leave)
    atexit.register(_endings[0].leave)

"""How what stops a job reaches its ranks: signals to this process, passed on to a launcher that it started.

What ranks make of them is not known here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from asynccoll.launch import child, processes

__all__ = ["launched", "on_stop_signals", "pass_on"]

#: Ctrl-C, ``kill``, the end of a terminal, Ctrl-\\: the last two may be ignored, and then are (``nohup``).
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_STOPPING = (*_ALWAYS, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def launched(
    line: Sequence[str], environ: Mapping[str, str], stdin: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Another launcher, by its command line, which dies with this process; at an error it is stopped.

    It has a session of its own: Ctrl-C on a terminal would reach it beside what is passed on, and at the
    second mpiexec leaves at once, with ranks that have not cleaned up.
    """
    running = subprocess.Popen(
        [sys.executable, child.__file__, "program", *line],
        env={**environ, **child.launching()},
        stdin=stdin,
        start_new_session=True,
    )
    try:
        yield running
    except BaseException:  # Ctrl-C, say: nobody waits for the ranks any more
        _end(running)
        raise


def pass_on(number: signal.Signals, running: subprocess.Popen[bytes]) -> None:
    """Have a launcher stop its ranks: at a hangup, say, it might only end itself."""
    running.send_signal(number if number in _ALWAYS else signal.SIGTERM)


def _end(running: subprocess.Popen[bytes]) -> None:
    """End a launcher: as at Ctrl-C, if need be by SIGTERM, and at last by force."""
    try:
        for number in _ALWAYS:
            running.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(processes.INTERRUPT_GRACE_S)
    finally:
        running.kill()
        running.wait()


def on_stop_signals(
    first: Callable[[signal.Signals], None],
    *,
    stuck: Callable[[signal.Signals], None] | None = None,
) -> None:
    """Call ``first`` for the first signal that stops a job; kill all children at the second.

    A rank that waits in native code does not notice SIGINT, so three seconds after it what is left gets
    SIGTERM. (SIGTERM is never sent twice: a handler that saves a checkpoint would be entered again.) And
    if it is this process that waits in native code, so that ``first`` cannot be called by then, ``stuck``
    is called on another thread.
    """
    noticed = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if noticed.is_set():
            if (
                number != signal.SIGHUP
            ):  # the end of a terminal may be told twice: by its shell, and the kernel
                processes.signal_children(signal.SIGKILL)
            return
        noticed.set()
        if number == signal.SIGINT:
            escalation = threading.Timer(
                processes.INTERRUPT_GRACE_S, processes.signal_children, [signal.SIGTERM]
            )
            escalation.daemon = True
            escalation.start()
        first(signal.Signals(number))

    for number in _STOPPING:
        if number in _ALWAYS or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handle)
    if stuck is not None:
        _watch_for_signals(noticed, stuck)


def _watch_for_signals(noticed: threading.Event, stuck: Callable[[signal.Signals], None]) -> None:
    """Have ``stuck`` called if a stop signal has come and is not ``noticed`` in time."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            (number,) = os.read(reader, 1)
            if number in _STOPPING and not noticed.wait(processes.INTERRUPT_GRACE_S):
                stuck(signal.Signals(number))

    threading.Thread(target=watch, name="asynccoll-signals", daemon=True).start()

"""No process is left behind: finding, stopping and reaping what a launcher started.

On Linux this process adopts the orphans of its children (it becomes their subreaper), so whatever
a killed rank had started is found here too. Elsewhere the engine's own clean-up has to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

__all__ = ["adopt_orphans", "children", "end", "kill_children", "on_stop_signals", "signal_children"]

#: Time for ranks to end by themselves on Ctrl-C before they get SIGTERM.
_INTERRUPT_GRACE_S = 3.0

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_KILL_DEADLINE_S = 5.0
_REAP_INTERVAL_S = 0.01


def adopt_orphans() -> None:
    """Become the parent of every process whose parents die below us."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The direct children of this process, those that ended and were not reaped included."""
    own = str(os.getpid())
    found = []
    for entry in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (any text) state ppid ...
            after_name = entry.read_text(errors="replace").rpartition(")")[2].split()
            if after_name[1] == own:
                found.append(int(entry.parent.name))
    return found


def signal_children(number: signal.Signals) -> None:
    """Send a signal to every child and, where it leads a group, to all of that group."""
    for pid in children():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def kill_children() -> None:
    """Kill and reap all descendants: killed children hand theirs to us, until none is left."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while children() and time.monotonic() < deadline:
        signal_children(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_REAP_INTERVAL_S)


def end(started: Sequence[BaseProcess]) -> None:
    """Return when all have ended: by themselves if Ctrl-C reached them too, else by SIGTERM, else killed."""
    try:
        _join(started)
        for process in started:
            process.terminate()
        _join(started)
    finally:
        for process in started:
            process.kill()
            process.join()


def _join(started: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + _INTERRUPT_GRACE_S
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))


def on_stop_signals(
    first: Callable[[signal.Signals], None],
    *,
    stuck: Callable[[signal.Signals], None] | None = None,
) -> None:
    """Call ``first`` for the first Ctrl-C or SIGTERM; kill all children at the second.

    A rank that waits in native code does not notice SIGINT, so three seconds after it what is left gets
    SIGTERM. (SIGTERM is never sent twice: a handler that saves a checkpoint would be entered again.) And
    if it is this process that waits in native code, so that ``first`` cannot be called by then, ``stuck``
    is called on another thread.
    """
    noticed = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if noticed.is_set():
            signal_children(signal.SIGKILL)
            return
        noticed.set()
        if number == signal.SIGINT:
            escalation = threading.Timer(_INTERRUPT_GRACE_S, signal_children, [signal.SIGTERM])
            escalation.daemon = True
            escalation.start()
        first(signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM):
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
            if number in (signal.SIGINT, signal.SIGTERM) and not noticed.wait(_INTERRUPT_GRACE_S):
                stuck(signal.Signals(number))

    threading.Thread(target=watch, name="asynccoll-signals", daemon=True).start()

"""Finds, stops and reaps the processes that a launcher started, so that none is left behind.

On Linux this process adopts the orphans of its children (it becomes their subreaper), so whatever
a killed rank had started is found here too. Elsewhere the engine's own clean-up has to suffice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

#: Time for ranks to end by themselves on Ctrl-C before they get SIGTERM.
INTERRUPT_GRACE_S = 3.0

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_KILL_DEADLINE_S = 5.0
_REAP_INTERVAL_S = 0.01


#: Children that this process had before: a shell started them, and then became this process by ``exec``.
_OTHERS: set[int] = set()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parents die; to be called before any is started."""
    _OTHERS.update(children())
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the direct children of this process except ``_OTHERS``, also those not reaped yet."""
    return _children_of([os.getpid()])


def _children_of(parents: Sequence[int]) -> list[int]:
    wanted = {str(pid) for pid in parents}
    found = []
    for entry in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (any text) state ppid ...
            after_name = entry.read_text(errors="replace").rpartition(")")[2].split()
            if after_name[1] in wanted:
                found.append(int(entry.parent.name))
    return [pid for pid in found if pid not in _OTHERS]


def signal_descendants(number: signal.Signals) -> None:
    """Send a signal to every process below this one, parents first."""
    below = children()
    while below:
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        below = _children_of(below)


def continue_stopped() -> None:
    """Continue descendants that are stopped (SIGSTOP), so that they notice the signal that ends them."""
    signal_descendants(signal.SIGCONT)


def signal_children(number: signal.Signals) -> None:
    """Send a signal to every child or, if it leads a process group, to the whole group."""
    _signal(children(), number)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def end_children() -> None:
    """End all descendants: each child gets SIGTERM once; what is left after the grace period is killed."""
    told: set[int] = set()
    deadline = time.monotonic() + INTERRUPT_GRACE_S
    while (left := children()) and time.monotonic() < deadline:
        _signal([pid for pid in left if pid not in told], signal.SIGTERM)
        told.update(left)
        _reap()
    kill_children()


def kill_children() -> None:
    """Kill and reap all descendants: the children of killed ones become ours, until none is left."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while children() and time.monotonic() < deadline:
        signal_children(signal.SIGKILL)
        _reap()


def _reap() -> None:
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
    deadline = time.monotonic() + INTERRUPT_GRACE_S
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))

"""Stack traces of this process's forked children, for a test that hangs: nothing else knows the children."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path

_ASKS = signal.SIGUSR1
#: A string that faulthandler writes once per process.
_ONCE = "Current thread"
_file = tempfile.TemporaryFile("w+")  # noqa: SIM115  # children that are forked write to it, too


def listen() -> None:
    """Make children that are forked from now on write their stacks when asked by a signal."""
    faulthandler.register(_ASKS, file=_file, all_threads=True)


def stacks(seconds: float = 2.0) -> str:
    """Return the stacks that the children write within ``seconds``; "" without children."""
    begun = os.fstat(_file.fileno()).st_size
    asked = [pid for pid in _children() if _listens(pid)]
    for pid in asked:
        os.kill(pid, _ASKS)
    until = time.monotonic() + seconds
    while (told := _written(begun)).count(_ONCE) < len(asked) and time.monotonic() < until:
        time.sleep(0.01)  # there is no notification when a child has written
    return told


def _written(begun: int) -> str:
    _file.seek(begun)
    return _file.read()


def _children() -> list[int]:
    threads = Path("/proc/self/task").iterdir()
    return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]


def _listens(pid: int) -> bool:
    """Whether it is a fork of this process: the signal would kill any other program."""
    try:
        told = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line.split()[1] for line in told.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (_ASKS - 1) & 1)

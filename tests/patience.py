"""How long tests wait for something that must happen.

A test that passes does not use up its limit, so on a slow machine the limits can simply be raised:
``ASYNCCOLL_TEST_PATIENCE=4`` multiplies every time limit by four.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

FACTOR = float(os.environ.get("ASYNCCOLL_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """Return a time limit, given the seconds that suit a machine of the usual speed."""
    return seconds * FACTOR


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll ``condition`` for at most ``seconds``. Returns whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def outlive(pids: Iterable[int], seconds: float = 5.0) -> list[int]:
    """Return the processes that still exist after ``seconds``; a killed one takes a moment to disappear."""
    deadline = time.monotonic() + patient(seconds)
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left

"""How long tests wait for what has to come.

What passes costs none of it, so a machine that is slow for an hour needs only more of it:
``ASYNCCOLL_TEST_PATIENCE=4`` multiplies every time limit by four.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

FACTOR = float(os.environ.get("ASYNCCOLL_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """These seconds, on a machine as quick as they were chosen for."""
    return seconds * FACTOR


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true within so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def outlive(pids: Iterable[int], seconds: float = 5.0) -> list[int]:
    """Those of the processes that are still there after so long; a killed one takes a moment to go."""
    deadline = time.monotonic() + patient(seconds)
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left

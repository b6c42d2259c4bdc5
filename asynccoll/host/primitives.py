"""Threads, locks, clocks and sleep, under the names that the standard library has for them.

What stands between a user's call and a backend takes them by attribute of the package (``host.Lock()``,
``host.monotonic()``), and never keeps one under a name of its own: so what stands behind a name there can be
exchanged for all of it at once, and the same code runs in another world's time. Backends and launchers have
threads and clocks of their own: they are the edge, and another world has other ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import getpid
from queue import SimpleQueue
from socket import gethostname
from threading import Condition, Event, Lock, RLock, Thread, current_thread, get_ident
from time import monotonic, perf_counter, sleep
from time import time as wall_clock

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "SimpleQueue",
    "Thread",
    "current_thread",
    "get_ident",
    "gethostname",
    "getpid",
    "give_way",
    "monotonic",
    "perf_counter",
    "sleep",
    "wall_clock",
]


def _give_way() -> None:
    sleep(0)


#: Let another thread run, if one wants to.
give_way: Callable[[], None] = getattr(os, "sched_yield", _give_way)

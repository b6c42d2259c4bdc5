"""Threads, locks, clocks and sleep, under their names in the standard library.

All code between a user's call and a backend uses them as attributes of the package (``host.Lock()``,
``host.monotonic()``), and never binds one to another name. So a simulation can replace each of them in one
place, and the same code then runs in simulated time. Backends and launchers use the standard library
directly: they are at the edge, and a simulation has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import getpid
from queue import SimpleQueue
from socket import gethostname
from threading import Condition, Event, Thread, current_thread, get_ident
from time import monotonic, perf_counter, sleep
from time import time as wall_clock

from asynccoll.host.locks import Lock, RLock

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


#: Yield the CPU to another thread, if one is ready to run.
give_way: Callable[[], None] = getattr(os, "sched_yield", _give_way)

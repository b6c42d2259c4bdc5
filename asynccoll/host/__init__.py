"""The process and its system: threads and clocks, forks, exits, sockets, the store, and who is calling.

This package must not know what a collective is: the layers above pass in functions, values and protocols.
"""

from asynccoll.host.each import call_each, call_off
from asynccoll.host.primitives import (
    Condition,
    Event,
    Lock,
    RLock,
    SimpleQueue,
    Thread,
    current_thread,
    get_ident,
    gethostname,
    getpid,
    give_way,
    monotonic,
    perf_counter,
    sleep,
    wall_clock,
)
from asynccoll.host.state import per_process

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "SimpleQueue",
    "Thread",
    "call_each",
    "call_off",
    "current_thread",
    "get_ident",
    "gethostname",
    "getpid",
    "give_way",
    "monotonic",
    "per_process",
    "perf_counter",
    "sleep",
    "wall_clock",
]

"""What the system gives: threads and clocks, processes, forks, exits, sockets, the store, and who is calling.

Must not know what a collective is: what is above is handed to it as a function, a value or a protocol.
"""

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

"""Keeping torch's log lines from waiting for a name server.

torch names the peer of each of its connections in a log line, by a reverse look-up even if the line is not
logged. It looks up an IPv4-mapped IPv6 address, which no hosts file lists. A name server that does not answer
costs ten seconds each time, until a look-up fails permanently; then torch writes numeric addresses for the
rest of the process. So if look-ups are slow, the first one is made to fail immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import socket
import sys
from collections.abc import Iterator
from typing import Any

from asynccoll.backends.api.within import within

#: A look-up that takes less does no harm. If it takes longer, the start of a job is delayed by this much.
_QUICK_SECONDS = 0.03


class _Resolver(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state``, of which each thread has one."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int))


@contextlib.contextmanager
def without_lookups(host: str, *, quick: bool | None = None) -> Iterator[None]:
    """Make look-ups of this thread fail without a query, if they are slow and ``host`` is not a name.

    ``quick`` is the result of ``names_are_quick`` in another process of this host, if known.
    """
    is_slow = _is_address(host) and not (names_are_quick(host) if quick is None else quick)
    state = _of_this_thread() if is_slow else None
    if state is None:
        yield
        return
    before, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = before


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


@functools.cache
def names_are_quick(address: str) -> bool:
    """Whether the look-up that torch makes is quick. Waits ``_QUICK_SECONDS``, once, if it is not."""
    dressed = address if ":" in address else f"::ffff:{address}"

    def look_up() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(dressed)  # not getnameinfo, which keeps the GIL in Python 3.11.2

    try:
        within(_QUICK_SECONDS, look_up, f"the look-up of {address}")
    except TimeoutError:
        return False
    return True


def _of_this_thread() -> Any:
    """Return this thread's resolver state in glibc; None if it does not look as expected."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        library.__res_init()
        find = library.__res_state
    except AttributeError:  # another C library
        return None
    find.restype = ctypes.POINTER(_Resolver)
    state = find().contents
    known = 1 <= state.retrans <= 60 and 1 <= state.retry <= 10
    return state if known else None

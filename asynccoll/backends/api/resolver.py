"""Keeping torch's log lines from waiting for a name server.

torch names the peer of each of its connections in a log line, by a reverse look-up whether or not anybody
reads the line: of an IPv4 address in IPv6 dress, which no hosts file knows. A name server that does not
answer costs ten seconds each time, until a look-up fails for good; then torch writes numbers for the rest
of the process. So where names are slow, the first look-up is made to fail at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["names_are_quick", "without_lookups"]

#: Names that come sooner do no harm. A job's start waits as long where they do not come.
_QUICK_SECONDS = 0.03


class _Resolver(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, of which each thread has one."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int))


@contextlib.contextmanager
def without_lookups(host: str, *, quick: bool | None = None) -> Iterator[None]:
    """Have look-ups of this thread fail instead of being sent, where names are slow and ``host`` is none.

    ``quick`` is what another process of this host has found ``names_are_quick`` to be.
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
    """Whether the look-up that torch makes is over at once; finding that it is not takes a moment, once."""
    dressed = address if ":" in address else f"::ffff:{address}"
    done = threading.Event()

    def look_up() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(dressed)  # in getnameinfo Python 3.11.2 keeps its lock
        done.set()

    threading.Thread(target=look_up, name="asynccoll-look-up", daemon=True).start()
    return done.wait(_QUICK_SECONDS)


def _of_this_thread() -> Any:
    """glibc's resolver, if it is as we know it."""
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

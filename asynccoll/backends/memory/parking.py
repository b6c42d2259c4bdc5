"""How a thread sleeps until another process wakes it: futexes, on words in memory that both share.

The word is not 0 while a waiter may sleep; the waker sets it to 0 first. Python has no function for this
system call, so it is called by its number, which is the same in every version of Linux.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

#: The number of the system call. Only x86-64 is supported: of the usual processors it alone keeps stores in
#: order, as the protocol needs.
_FUTEX = {"x86_64": 202, "AMD64": 202}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def supported() -> bool:
    """Whether this machine is supported."""
    return _libc is not None and _FUTEX is not None


class Parking:
    """Sleeping on the words of one buffer, each given by its offset in bytes."""

    def __init__(self, buffer: Any) -> None:
        self._kept = ctypes.c_char.from_buffer(buffer)
        self._start = ctypes.addressof(self._kept)

    def sleep(self, place: int, said: int, seconds: float) -> None:
        """Sleep until woken, for at most ``seconds``; return at once if the word is not ``said``."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        _libc.syscall(
            _FUTEX,
            ctypes.c_void_p(self._start + place),
            _WAIT,
            ctypes.c_uint(said),
            ctypes.byref(limit),
            None,
            0,
        )

    def wake(self, place: int) -> None:
        """Wake all threads, of any process, that sleep on the word."""
        _libc.syscall(_FUTEX, ctypes.c_void_p(self._start + place), _WAKE, _EVERYBODY, None, None, 0)

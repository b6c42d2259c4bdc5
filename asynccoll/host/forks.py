"""What happens in a forked child to what only the parent can use.

A fork copies the memory of a process, but of its threads only the one that forks. So a lock that another
thread held stays locked for ever in the child, and a native object whose destructor joins its threads, or
writes to a socket that parent and child share, must never be destroyed there. Those that the parent still
uses are kept (``keep``); those that it has let go of in a cycle would be destroyed by whichever collection
comes first in the child, so its collector leaves alone what was there before the fork.

It must not know whose locks and objects these are.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

__all__ = ["in_child", "keep", "renew", "renewed"]

in_child: Any = getattr(os, "register_at_fork", lambda **_: None)
in_child(after_in_child=gc.freeze)  # before all others, which make objects and so may start a collection
_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes = [ctypes.py_object]


#: The locks that are modules' own.
renewed: list[object] = []


def renew(lock: Any) -> None:
    """Have ``lock``, a module's own, unlocked in a forked child, as the standard library has its own."""
    renewed.append(lock)
    in_child(after_in_child=lock._at_fork_reinit)


def keep(*things: object) -> None:
    """Never destroy ``things``, nor what they hold, not even when the interpreter ends."""
    for thing in things:
        _keep(thing)

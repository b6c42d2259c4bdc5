"""What happens in a forked child to locks and native objects that only the parent can use.

A fork copies the memory of a process, but only the thread that forks. So a lock that another thread held
stays locked forever in the child, and a native object whose destructor joins its threads, or writes to a
socket that parent and child share, must never be destroyed there. Objects that the parent still uses are kept
alive (``keep``). Objects that the parent has dropped but that are in a reference cycle would be destroyed by
the child's first garbage collection, so the child's collector ignores all objects from before the fork.

This module must not know whose locks and objects these are.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

in_child: Any = getattr(os, "register_at_fork", lambda **_: None)
in_child(after_in_child=gc.freeze)  # registered first: later hooks make objects, which may start a collection
_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes = [ctypes.py_object]


_inherited: list[object] = []


def _inherit() -> None:
    """Note torch's default group, which is the parent's, even if most of this library is loaded later."""
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    _inherited[:] = [getattr(getattr(torch, "GroupMember", None), "WORLD", None)]


in_child(after_in_child=_inherit)


def inherited() -> object:
    """Return torch's default group as it was when this process was forked; None if there was none."""
    return _inherited[0] if _inherited else None


#: The locks that were created when their modules were imported.
renewed: list[object] = []


def renew(lock: Any) -> None:
    """Unlock ``lock``, a module global, in forked children, as the standard library does with its locks."""
    renewed.append(lock)
    in_child(after_in_child=lock._at_fork_reinit)


def keep(*things: object) -> None:
    """Never destroy ``things`` or anything that they hold, not even when the interpreter ends."""
    for thing in things:
        _keep(thing)

"""Locks that Ctrl-C does not leave locked: it comes before a block ``with lock:`` is entered, or within it.

Most versions of Python promise that for a lock of theirs, which takes itself in C. Python 3.14 does not (its
gh-148874): there an interrupt may come once the lock is taken, before the block begins that would release it.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

__all__ = ["Lock", "RLock"]

if TYPE_CHECKING or sys.version_info[:2] != (3, 14):
    from threading import Lock, RLock
else:
    import _thread

    # Python 3.14 handles signals behind every call, but not behind a step of a loop, nor as a function in
    # Python returns. So these locks are taken in a step of a loop. They are released in C, as others are.

    class Lock:
        """As ``threading.Lock``, which cannot be inherited from."""

        __slots__ = ("__exit__", "__weakref__", "_at_fork_reinit", "_taken", "acquire", "locked", "release")

        def __init__(self) -> None:
            lock = threading.Lock()
            self._taken, self.__exit__ = iter(lock.__enter__, None), lock.__exit__
            self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked
            self._at_fork_reinit = lock._at_fork_reinit

        def __enter__(self) -> bool:
            for taken in self._taken:
                return taken
            raise AssertionError

    class RLock(_thread.RLock):
        """As ``threading.RLock``."""

        __slots__ = ()

        def __enter__(self) -> bool:
            for taken in iter(super().__enter__, None):
                return taken
            raise AssertionError

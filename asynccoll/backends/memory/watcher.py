"""The thread of a process that looks after its regions while nobody waits in place, and notices who is gone.

It sleeps until another rank rings its bell, or one of their processes ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Watcher"]


class Watcher:
    """One rank's. ``bell`` is rung by others; ``processes``: by rank, what is readable once it has ended."""

    def __init__(self, bell: int, processes: Mapping[int, int]) -> None:
        self._bell = bell
        self._ranks = {descriptor: rank for rank, descriptor in processes.items()}
        self._engines: weakref.WeakSet[object] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stopped = False
        #: the ranks whose processes have ended
        self.gone: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="asynccoll-memory", daemon=True)
        self._thread.start()

    def add(self, engine: object) -> None:
        """Look at this one, too, when the bell is rung."""
        with self._lock:
            self._engines.add(engine)

    def ring(self) -> None:
        """As another rank does."""
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._bell, *self._ranks):
            poll.register(descriptor, select.POLLIN)
        while not self._stopped:
            for descriptor, _ in poll.poll():
                if descriptor == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(descriptor)
                else:
                    poll.unregister(descriptor)
                    self.gone.add(self._ranks[descriptor])
            for engine in self._known():
                engine.attend()

    def _known(self) -> Iterable[Any]:
        with self._lock:
            return list(self._engines)

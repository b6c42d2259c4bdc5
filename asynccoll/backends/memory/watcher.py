"""A rank's thread that moves its calls while no waiter does, and notices when processes of other ranks end.

It sleeps until another rank rings its bell, or another rank's process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from asynccoll.backends.api import is_new, locks

_log = logging.getLogger("asynccoll.memory")
#: How long to rest after an error: the engine that has raised it is attended again, and may raise it again.
_REST_SECONDS = 0.01


class Watcher:
    """The watcher of one rank. Other ranks ring its ``bell``, an eventfd.

    ``processes`` has a descriptor for each other rank, which becomes readable when its process has ended.
    """

    def __init__(self, bell: int, processes: Mapping[int, int]) -> None:
        self._bell = bell
        self._ranks = {descriptor: rank for rank, descriptor in processes.items()}
        self._engines: weakref.WeakSet[object] = weakref.WeakSet()
        self._lock = locks.Lock()
        self._logged: set[object] = set()
        self._stopped = False
        #: the ranks whose processes have ended
        self.gone: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="asynccoll-memory", daemon=True)
        self._thread.start()

    def add(self, engine: object) -> None:
        """Call ``attend`` of this engine, too, when the bell is rung or a process has ended."""
        with self._lock:
            self._engines.add(engine)

    def ring(self) -> None:
        """Ring the bell, as other ranks do."""
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
                self._attend(engine)

    def _attend(self, engine: Any) -> None:
        """Call ``engine.attend``; log a new error (a callback's, say): other calls need this thread."""
        try:
            engine.attend()
        except Exception as error:
            if is_new(error, self._logged):
                _log.exception("moving calls through memory has failed; it is tried again")
            time.sleep(_REST_SECONDS)
            self.ring()  # callbacks behind one that raised have not been called yet

    def _known(self) -> Iterable[Any]:
        with self._lock:
            return list(self._engines)

"""The progress thread of one replica, which does in order what would block the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_CLOSE_SECONDS = 5.0


class Progress:
    """A thread that runs jobs one after the other and sleeps while there are none."""

    def __init__(self, name: str, begin: Callable[[], object]) -> None:
        """``begin`` runs first, in the thread."""
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._begin = begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: Callable[[], object]) -> None:
        """Hand over ``job``, which must not raise. After ``close``, it is run in the calling thread."""
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
                return
        job()

    def _run(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            job()

    def disown(self) -> None:
        """In a forked child, run jobs in the callers' threads: the thread is the parent's."""
        self._lock = threading.Lock()
        self._closed = True

    def close(self) -> None:
        """End the thread once it has run the jobs that it was given."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

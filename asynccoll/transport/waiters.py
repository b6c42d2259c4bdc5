"""Reusable threads for native operations that can only be waited for (gloo's send and recv).

Jobs of one key run in order; jobs of different keys never wait for each other, so a late message delays only
jobs with its key. A thread serves one key at a time, is reused for the next key, and exits after being idle
for a while: the number of threads is that of keys with jobs, not that of operations.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from asynccoll import host
from asynccoll.transport.completion import Promise

_log = logging.getLogger("asynccoll.work")

_IDLE_SECONDS = 10.0


class Waiters:
    """A pool of threads that run the jobs of one key one after another, and different keys concurrently."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = host.RLock()
        self._wake = host.Condition(self._lock)
        #: the jobs of keys that wait for a thread, in order of arrival, and of keys that a thread serves
        self._ready: dict[Hashable, deque[Callable[[], object]]] = {}
        self._served: dict[Hashable, deque[Callable[[], object]]] = {}
        self._idle = 0
        _pools[self] = None

    def forget_parent(self) -> None:
        """Reset the pool in a forked child, which has neither the parent's threads nor their jobs."""
        self.__init__(self._name)  # type: ignore[misc]  # the same object: others refer to it

    def submit(self, key: Hashable, job: Callable[[], object]) -> None:
        """Run ``job`` after earlier jobs of the same ``key``. If it raises, the exception is only logged."""
        with self._lock:  # not the condition: an interrupt may leave that locked
            for of_keys in (self._served, self._ready):
                if key in of_keys:
                    of_keys[key].append(job)
                    return
            if self._idle > len(self._ready):  # more idle threads than keys that wait for one
                self._wake.notify()
            else:
                host.Thread(target=self._serve, name=self._name, daemon=True).start()
            # Last, and by a single store, so that an interrupt (Ctrl-C) cannot leave a job without a thread.
            self._ready[key] = deque([job])

    def run(self, key: Hashable, job: Callable[[], object], promise: Promise) -> Promise:
        """Submit ``job``; return ``promise``, which ends with the job: with its error if it raises."""

        def completing() -> None:
            try:
                job()
            except BaseException as error:
                promise.settle(error)
            else:
                promise.settle()

        self.submit(key, completing)
        return promise

    def _serve(self) -> None:
        while (key := self._next_key()) is not None:
            while (job := self._next_job(key)) is not None:
                try:
                    job()
                except Exception:  # from a callback; this thread still has to run later jobs of the key
                    _log.exception("%r has failed", job)

    def _next_key(self) -> Hashable | None:
        with self._wake:
            self._idle += 1
            try:
                if not self._wake.wait_for(lambda: self._ready, _IDLE_SECONDS):
                    return None
                key = next(iter(self._ready))
                self._served[key] = self._ready.pop(key)
                return key
            finally:
                self._idle -= 1

    def _next_job(self, key: Hashable) -> Callable[[], object] | None:
        with self._wake:
            queue = self._served[key]
            if queue:
                return queue.popleft()
            del self._served[key]
            return None


def _forget_parent(pools: WeakKeyDictionary[Waiters, None]) -> None:
    for pool in list(pools):
        pool.forget_parent()


_pools: WeakKeyDictionary[Waiters, None] = host.per_process(WeakKeyDictionary, _forget_parent)


class InProgress:
    """A counter of the threads inside a block that must not be cut off: ``with in_progress: ...``."""

    def __init__(self) -> None:
        self._lock = host.RLock()  # taken by itself, as above
        self._changed = host.Condition(self._lock)
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until no thread is inside; returns whether none is."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._count, seconds)

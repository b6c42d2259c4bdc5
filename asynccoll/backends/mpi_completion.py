"""What an MPI request is to the core: tested in place by its waiter, else by the progress thread.

MPI moves data only while somebody is inside it, and has no descriptor to wait on. So whoever waits
tests and yields the processor in turns for as long as the operation is expected to take, then naps
between tests; what nobody waits for is tested by the progress thread (``asynccoll.progress``).

A request must not be tested by two threads at once: the lock is only ever tried, never waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from mpi4py import MPI

from asynccoll.completion import Callback, Completion
from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError
from asynccoll.progress import LONGEST_NAP_SECONDS, SHORTEST_NAP_SECONDS, give_way, progress

__all__ = ["Fate", "Guarded", "Many", "MpiCompletion", "typed"]

#: How long every operation is expected to take at least; a small one among awake ranks takes 1 % of it.
GRACE_SECONDS = 2e-4
#: Expected beyond that, per byte.
SECONDS_PER_BYTE = 1e-9
#: From this size on the progress thread begins at once: the transfer is long enough to be worth it.
LARGE_BYTES = 4 << 20
#: Tests in a row before the processor is offered to others.
TESTS_PER_YIELD = 4

#: Requests that will never end, with the memory that MPI may still write to.
_abandoned: list[Any] = []


class Fate:
    """Whether the communicator of a request is still of use."""

    __slots__ = ("abandoned",)

    def __init__(self) -> None:
        self.abandoned = False


class MpiCompletion(Completion):
    """One request (or ``Many``), and the memory it works on."""

    __slots__ = (
        "_buffers",
        "_callbacks",
        "_error",
        "_fate",
        "_lock",
        "_request",
        "attended",
        "finished",
        "ripe",
        "tight",
    )

    def __init__(self, request: Any, buffers: Any, size_bytes: int, fate: Fate) -> None:
        self._request = request
        self._buffers = buffers
        self._fate = fate
        self._lock = threading.Lock()
        self._callbacks: list[Callback] | None = None
        self._error: CollectiveError | None = None
        self.finished = False
        self.attended = False
        now = monotonic()
        self.tight = now + GRACE_SECONDS + size_bytes * SECONDS_PER_BYTE
        if size_bytes < LARGE_BYTES:
            self.ripe = now + GRACE_SECONDS
            progress.watch(self)
        else:
            self.ripe = now
            progress.watch(self)
            progress.rouse()

    def done(self) -> bool:
        # Callbacks may take locks that the caller holds: with any, only poll() ends it.
        return self.finished or (self._callbacks is None and self._test())

    def _test(self) -> bool:
        """Ask MPI, unless another thread is asking; whether it is over."""
        if not self._lock.acquire(blocking=False):
            return self.finished
        try:
            if not self.finished and self._ask():
                self._request = self._buffers = None
                self.finished = True
        finally:
            self._lock.release()
        return self.finished

    def _ask(self) -> bool:
        try:
            return bool(self._request.Test())
        except MPI.Exception as error:
            self._error = typed(error)
            return True

    def poll(self) -> bool:
        if not self.finished and self._fate.abandoned:
            _abandoned.append(self)
            return True
        if not self._test():
            return False
        if self._callbacks is not None:
            self._tell()
        return True

    def _tell(self) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            callback()

    def wait(self, seconds: float) -> bool:
        # The thread may be testing just now, and the other way round: either ends it.
        self.attended = True
        try:
            return self._wait_tightly(monotonic() + seconds)
        finally:
            self.attended = False

    def _wait_tightly(self, deadline: float) -> bool:
        tight = min(deadline, max(self.tight, monotonic() + GRACE_SECONDS))
        poll = self.poll
        while True:
            for _ in range(TESTS_PER_YIELD):
                if poll():
                    return self.finished
            if monotonic() >= tight:
                return self._wait_with_naps(deadline)
            give_way()

    def _wait_with_naps(self, deadline: float) -> bool:
        nap = SHORTEST_NAP_SECONDS
        while not self.poll():
            left = deadline - monotonic()
            if left <= 0:
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP_SECONDS)
        return self.finished

    def add_callback(self, callback: Callback) -> None:
        with self._lock:
            if not self.finished:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                self.ripe = 0.0
                later = True
            else:
                later = False
        if later:
            progress.rouse()
        else:
            callback()

    def error(self) -> CollectiveError | None:
        return self._error


class Many:
    """Several requests as one: a call in parts, for counts that the library cannot take at once."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Sequence[Any]) -> None:
        self._requests = list(requests)

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        return bool(MPI.Request.Testall(self._requests))


class Guarded:
    """A request of a library that wants one call at a time (``MPI_THREAD_SERIALIZED``)."""

    __slots__ = ("_gate", "_request")

    def __init__(self, request: Any, gate: threading.Lock) -> None:
        self._request = request
        self._gate = gate

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        with self._gate:
            return bool(self._request.Test())


#: MPI error classes by what they mean to a user; the rest are plain failures.
_LOST = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_PROC_ABORTED", "ERR_REVOKED")
_CLASSES: dict[int, Callable[[str], CollectiveError]] = {
    MPI.ERR_TRUNCATE: lambda text: CollectiveMismatchError(
        f"{text}: a rank sent more than another expects; pass the same shapes and dtypes on every rank "
        "(check='full' tells which differ)"
    ),
    **{
        getattr(MPI, name): PeerLostError
        for name in _LOST
        if getattr(MPI, name, MPI.ERR_UNKNOWN) != MPI.ERR_UNKNOWN
    },
}


def typed(error: MPI.Exception) -> CollectiveError:
    """Our error for one that MPI returned."""
    text = f"MPI reports {error.Get_error_string().split(',')[0].strip()}"
    ours = _CLASSES.get(error.Get_error_class(), CollectiveError)(text)
    ours.__cause__ = error
    return ours

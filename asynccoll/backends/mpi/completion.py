"""What an MPI request is to the core: tested in place by its waiter, else by the progress thread.

MPI moves data only while a thread is inside it, and has no descriptor to wait on. So a waiter
tests and yields the processor in turns for as long as the operation is expected to take, then naps
between tests; what nobody waits for is tested by the progress thread (``asynccoll.transport.progress``).

A request must not be tested by two threads at once: where the lock is taken, nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from mpi4py import MPI

from asynccoll.backends.api import (
    GRACE_SECONDS,
    LONGEST_NAP_SECONDS,
    SHORTEST_NAP_SECONDS,
    Callback,
    Polled,
    give_way,
    progress,
)
from asynccoll.backends.mpi.errors import typed
from asynccoll.errors import CollectiveError

__all__ = [
    "BURST",
    "BURST_WHERE_CROWDED",
    "LARGE_BYTES",
    "Common",
    "Guarded",
    "LeftToThread",
    "Many",
    "MpiCompletion",
    "never_ending",
]

#: How long an operation is expected to take beyond the grace, per byte.
SECONDS_PER_BYTE = 1e-9
#: From this size on the progress thread begins at once, where nobody has waited at once of late.
LARGE_BYTES = 4 << 20
#: Up to this size an operation among awake ranks is over in a fraction of the grace.
SMALL_BYTES = 64 << 10
#: Tests in a row before the processor is offered to others: some 10 us where every rank has a core.
BURST = 64
BURST_WHERE_CROWDED = 4
ONCE = range(1)

_new_lock = threading.Lock
watch: Callable[[MpiCompletion], None] = progress.watch

#: Requests that will never end, or that nobody knows, with the memory that MPI may still write to.
never_ending: list[object] = []
#: Calls a partial, without a step of Python in between.
_call: Callable[[partial[Any]], Any] = partial.__call__


class Common:
    """What the requests of one communicator have in common."""

    __slots__ = ("abandoned", "burst", "left", "overlapped")

    def __init__(self, burst: int) -> None:
        #: it is of no use any more; what is in flight there never ends
        self.abandoned: bool = False
        #: to go through in as many tests in a row, before the processor is offered to others
        self.burst: range = range(burst)
        #: the last large operation was left to itself for a while, so the next may be, too
        self.overlapped: bool = True
        #: the call that was left to the thread; it goes before any other
        self.left: LeftToThread | None = None


class MpiCompletion(Polled):
    """One request (or ``Many``), and the memory it works on."""

    over: bool = False
    attended: bool = False
    urgent: bool = False
    lateness: float | None = None
    _abandoned = False
    _since = 0.0  # when a large one was issued

    def __init__(self, request: Any, buffers: object, size_bytes: int, common: Common) -> None:
        self._request = request
        self._buffers = buffers
        self._size_bytes = size_bytes
        self._common = common
        self._lock = _new_lock()
        if size_bytes < LARGE_BYTES:
            watch(self)
        else:
            self._watch_large()

    def _watch_large(self) -> None:
        self._since = monotonic()
        self.urgent = self._common.overlapped
        watch(self)
        if self.urgent:
            progress.rouse()

    def expected(self) -> float:
        return GRACE_SECONDS + self._size_bytes * SECONDS_PER_BYTE

    def done(self) -> bool:
        # Callbacks may take locks that the caller holds: with any, only poll() ends it.
        return self.over or (self._callbacks is None and self._test())

    def _test(self, times: Iterable[int] = ONCE) -> bool:
        """Ask MPI, up to so often in a row, unless another thread is asking; whether it is over."""
        if self.over or self._lock.locked():
            return self.over
        with self._lock:  # not acquire(False): Ctrl-C as that returns would leave the lock held
            try:
                if self._request is not None:  # else another thread has seen its end between the two looks
                    test = self._request.Test
                    for _ in times:
                        if test():
                            self._request = self._buffers = None
                            self.fine = self.over = True
                            return True
            except (MPI.Exception, CollectiveError) as error:
                self._fail(error)
        return self.over

    def _fail(self, error: Exception) -> None:
        self._error = error if isinstance(error, CollectiveError) else typed(error)
        self._request = self._buffers = None
        self.over = True

    def poll(self) -> bool:
        if not self.over and (self._abandoned or self._common.abandoned):
            never_ending.append(self)
            return True
        # A transfer in many pieces needs many looks; each small, so that a waiter can take over.
        looks = 1 if self._size_bytes <= SMALL_BYTES else len(self._common.burst)
        while not self._test():
            looks -= 1
            if looks <= 0 or self.attended:
                return False
        self._tell()
        return True

    def wait(self, seconds: float) -> bool:
        self.attended = True  # the thread leaves it alone, unless it is testing just now
        try:
            if self._size_bytes >= LARGE_BYTES:
                self._common.overlapped = monotonic() - self._since > GRACE_SECONDS
            if not self._test(self._common.burst) and not self._wait(seconds):
                return False
        finally:
            self.attended = False
        if self._callbacks is not None:
            self._tell()
        return True

    def _wait(self, seconds: float) -> bool:
        """Test and yield for as long as it is expected to take, then nap in between."""
        now = monotonic()
        deadline = now + seconds
        return self._test_until(min(deadline, now + self.expected())) or self._test_with_naps(deadline)

    def _test_until(self, deadline: float) -> bool:
        while not self._test(self._common.burst):
            if monotonic() >= deadline:
                return False
            give_way()
        return True

    def _test_with_naps(self, deadline: float) -> bool:
        nap = SHORTEST_NAP_SECONDS
        while not self._test():
            left = deadline - monotonic()
            if left <= 0 or self._common.abandoned:
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP_SECONDS)
        return True

    def add_callback(self, callback: Callback) -> None:
        # Without the lock, which a test of a large transfer holds for milliseconds: either the thread
        # that ends it sees the callback, or we see that it has ended. (setdefault is atomic.)
        if self._size_bytes < SMALL_BYTES and not progress.here():
            # A thread that waits for the GIL of a busy program may be 5 ms late; a small operation
            # among awake ranks takes a hundredth of this grace.
            self._test_until(monotonic() + GRACE_SECONDS)
        self.__dict__.setdefault("_callbacks", []).append(callback)
        if self.over:
            self._tell()
        else:
            self.urgent = True
            progress.rouse()

    def abandon(self) -> None:
        self._abandoned = True

    def writing(self) -> bool:
        return not self.over


class Many:
    """Several requests as one: a call in parts, or a message and what goes ahead of it.

    It ends, well or with the first failure, when none of them is in flight: until then MPI uses their memory.
    """

    __slots__ = ("_error", "_requests")

    def __init__(self) -> None:
        self._requests: list[Any] = []
        self._error: MPI.Exception | None = None

    def make(self, calls: Sequence[partial[Any]]) -> Many:
        """Make the calls, unless that was done; returns itself."""
        if not (self._requests or self._error):
            try:
                # Within one call of C: Ctrl-C comes when all are made and known, or none is.
                self._requests.extend(map(_call, calls))
            except MPI.Exception as error:  # those before it are in flight
                self._error = error
        return self

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        requests = self._requests
        while requests:
            try:
                if not requests[0].Test():
                    return False
            except MPI.Exception as error:
                self._error = self._error or error
            del requests[0]
        if self._error is not None:
            raise self._error
        return True


class LeftToThread(MpiCompletion):
    """A large call that the progress thread makes, since nobody is expected to wait for it yet.

    A library may copy the whole tensor before a call returns (Open MPI does in place, MPICH where input
    and output differ), a quarter of the operation's time. The first to arrive makes the call: the
    thread, a waiter, or the caller of what is next in the order.
    """

    def __init__(
        self, request: Many, calls: Sequence[partial[Any]], buffers: object, size_bytes: int, common: Common
    ) -> None:
        """``request`` is what ``calls``, still to be made, are."""
        self._calls: Sequence[partial[Any]] | None = calls
        self._calling = _new_lock()
        common.left = self
        super().__init__(request, buffers, size_bytes, common)

    def make(self) -> None:
        """Make the calls, if nobody has; on return they have been made."""
        with self._calling:
            if self._calls is not None:
                self._request.make(self._calls)
                self._common.left = None
                self._calls = None  # last: Ctrl-C before leaves the rest to the next who comes

    def done(self) -> bool:
        return self._calls is None and super().done()  # to ask is not to wait for the call

    def _test(self, times: Iterable[int] = ONCE) -> bool:
        if self._calls is not None:
            self.make()
        return super()._test(times)


class Guarded:
    """A request of a library that wants one call at a time (``MPI_THREAD_SERIALIZED``)."""

    __slots__ = ("_gate", "_request")

    def __init__(self, request: Any, gate: threading.Lock) -> None:
        self._request = request
        self._gate = gate

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        with self._gate:
            return bool(self._request.Test())

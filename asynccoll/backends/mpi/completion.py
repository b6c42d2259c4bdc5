"""MPI requests as completions: tested in place by their waiter, else by the progress thread.

MPI moves data only while a thread is inside it, and has no descriptor to wait on. So a waiter tests, yields
the processor, and tests again for as long as the operation is expected to take; then it naps between tests.
The progress thread (``asynccoll.transport.progress``) tests the requests that have no waiter.

Two threads must not test a request at the same time. A thread that finds its lock taken does not wait for it.
"""

from __future__ import annotations

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
    locks,
    progress,
)
from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError

#: How long an operation is expected to take beyond the grace period, per byte.
SECONDS_PER_BYTE = 1e-9
#: From this size on the progress thread skips the grace period, unless the last such operation was awaited
#: within it (``Common.overlapped``).
LARGE_BYTES = 4 << 20
#: Up to this size an operation among ranks that are awake takes a fraction of the grace period.
SMALL_BYTES = 64 << 10
#: Tests in a row before a thread yields the processor: some 10 us if every rank has a core.
BURST = 64
BURST_WHERE_CROWDED = 4
ONCE = range(1)

_new_lock = locks.Lock
watch: Callable[[MpiCompletion], None] = progress.watch

#: Requests that will never end, or were lost to an interrupt, with the memory that MPI may still write to.
never_ending: list[object] = []
#: Calls a partial, without running Python code of ours in between.
_call: Callable[[partial[Any]], Any] = partial.__call__


class Common:
    """What the requests of one communicator have in common."""

    __slots__ = ("abandoned", "burst", "left", "overlapped")

    def __init__(self, burst: int) -> None:
        #: whether the communicator was given up; what is in flight on it never ends
        self.abandoned: bool = False
        #: has as many elements as tests are made in a row before a thread yields the processor
        self.burst: range = range(burst)
        #: whether the last large operation was not awaited for a while, so that the next may not be, either
        self.overlapped: bool = True
        #: the call that was left to the progress thread; it must be made before any other
        self.left: LeftToThread | None = None

    def make_left(self) -> None:
        """Make the call that was left to the progress thread, if any: the next call comes after it."""
        if (left := self.left) is not None:
            left.make()


class MpiCompletion(Polled):
    """One request (or ``Many``), and the memory it works on."""

    over: bool = False
    attended: bool = False
    urgent: bool = False
    lateness: float | None = None
    _abandoned = False
    _failed: MPI.Exception | CollectiveError | None = None
    _since = 0.0  # when the operation was issued, if it is large

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
        # Callbacks may take locks that the caller holds. So if there are any, only poll() and wait() test.
        return self.over or (self._callbacks is None and self._test())

    def _test(self, times: Iterable[int] = ONCE) -> bool:
        """Test once for each of ``times``, unless another thread is testing; return whether it is over."""
        if self.over or self._lock.locked():
            return self.over
        with self._lock:  # not acquire(False): Ctrl-C as that returns would leave the lock held
            try:
                if self._request is not None:  # else another thread has found its end since the check above
                    test = self._request.Test
                    for _ in times:
                        if test():
                            self._request = self._buffers = None
                            self.fine = self.over = True
                            return True
            except (MPI.Exception, CollectiveError) as error:
                # Without a call, as which Ctrl-C could come: MPI has forgotten the request, and would next
                # say that it has succeeded.
                self._failed = error
                self._request = self._buffers = None
                self.over = True
        return self.over

    def error(self) -> CollectiveError | None:
        if isinstance(self._failed, MPI.Exception):
            self._failed = typed(self._failed)
        return self._failed

    def poll(self) -> bool:
        if not self.over and (self._abandoned or self._common.abandoned):
            never_ending.append(self)
            return True
        # A transfer in many pieces needs many tests. They are made singly, so that a waiter can take over.
        looks = 1 if self._size_bytes <= SMALL_BYTES else len(self._common.burst)
        while not self._test():
            looks -= 1
            if looks <= 0 or self.attended:
                return False
        self._tell()
        return True

    def wait(self, seconds: float) -> bool:
        self.attended = True  # the progress thread leaves it alone, unless it is testing right now
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
        """Test and yield for as long as the operation is expected to take, then nap between tests."""
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
        if self._size_bytes <= SMALL_BYTES and not progress.here():
            # In a busy program the progress thread may wait 5 ms for the GIL. A small operation among ranks
            # that are awake takes a hundredth of this grace period.
            self._test_until(monotonic() + GRACE_SECONDS)
        # Without the lock, which a test of a large transfer holds for milliseconds: either the thread that
        # ends the operation sees the callback, or this thread sees that it has ended. (setdefault is atomic.)
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
    """Several requests as one: a call in parts, or a message and its header.

    It ends, with the first failure if any, when no request is in flight: until then MPI uses their memory.
    """

    __slots__ = ("_error", "_requests")

    def __init__(self) -> None:
        self._requests: list[Any] = []
        self._error: MPI.Exception | None = None

    def make(self, calls: Sequence[partial[Any]]) -> Many:
        """Make the calls, unless they have been made; return ``self``."""
        if not (self._requests or self._error):
            try:
                # Within one call of C, so that Ctrl-C comes before all calls, or once all requests are here.
                self._requests.extend(map(_call, calls))
            except MPI.Exception as error:  # the calls before the one that failed are in flight
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
    """A large call that is left to the progress thread, since no waiter is expected yet.

    A library may copy the whole tensor before the call returns, which takes a quarter of the operation's time
    (Open MPI does so in place, MPICH if input and output differ). The call is made by the first of these: the
    progress thread, a waiter, or the thread that makes the next call in the order.
    """

    def __init__(
        self, request: Many, calls: Sequence[partial[Any]], buffers: object, size_bytes: int, common: Common
    ) -> None:
        """``request`` combines ``calls``, which are still to be made."""
        self._calls: Sequence[partial[Any]] | None = calls
        self._calling = _new_lock()
        super().__init__(request, buffers, size_bytes, common)

    def _watch_large(self) -> None:
        self._common.left = self  # complete by now, as after Ctrl-C the next call makes it
        super()._watch_large()

    def make(self) -> None:
        """Make the calls, unless another thread has; on return they have been made."""
        with self._calling:
            if self._calls is not None:
                self._request.make(self._calls)
                self._common.left = None
                self._calls = None  # last: if Ctrl-C comes before, the next thread does the rest

    def done(self) -> bool:
        return self._calls is None and super().done()  # does not make the call, which may take long

    def _test(self, times: Iterable[int] = ONCE) -> bool:
        if self._calls is not None:
            self.make()
        return super()._test(times)


class Guarded:
    """A request of a library that takes one call at a time (``MPI_THREAD_SERIALIZED``)."""

    __slots__ = ("_gate", "_request")

    def __init__(self, request: Any, gate: locks.Lock) -> None:
        self._request = request
        self._gate = gate

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        with self._gate:
            return bool(self._request.Test())


#: MPI's error classes, by what they mean to a user; the others become plain ``CollectiveError``s.
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
    """Return our error for one that MPI raised."""
    text = f"MPI reports {error.Get_error_string().split(',')[0].strip()}"
    ours = _CLASSES.get(error.Get_error_class(), CollectiveError)(text)
    ours.__cause__ = error
    return ours

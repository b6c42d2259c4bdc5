"""How a call enters Horovod, and when it is over: asked of ``poll``, by a waiter or by the progress thread.

Horovod moves the data in a thread of its own. Nobody has to look before somebody wants to know.

Where process sets are made while the job runs, that thread meets the other ranks in every cycle, and
meanwhile holds the lock of its table of process sets. A call takes that lock with the interpreter's in hand:
one rank that is stopped, or cut off, would so stop every thread of the others for good, before anyone can be
told. Hence calls enter on a thread that first asks for Horovod's lock without the interpreter's.

What Horovod's ``synchronize`` calls spins until the end, so it is called only once ``poll`` has said that
it is there; it then forgets the handle, or raises.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from time import monotonic

from horovod.torch.mpi_ops import _basics, mpi_lib

from asynccoll.backends.api import LONGEST_NAP_SECONDS, SHORTEST_NAP_SECONDS, Callback, Polled, progress
from asynccoll.backends.horovod.failures import typed
from asynccoll.errors import AbortedError, CollectiveError

__all__ = ["Common", "HorovodCompletion"]

poll: Callable[[int], bool] = mpi_lib.horovod_torch_poll
clear: Callable[[int], object] = mpi_lib.horovod_torch_wait_and_clear


#: Room for more ranks than any job has, as their number may change meanwhile (elastic jobs).
_RANKS = (ctypes.c_int * 65_536)()


def is_running() -> bool:
    """Whether Horovod's thread takes calls; waits for its lock, and holds nobody up meanwhile."""
    return bool(_basics.MPI_LIB_CTYPES.horovod_process_set_ranks(0, _RANKS) == 0)


class Common:
    """What the operations of one communicator have in common."""

    __slots__ = ("abandoned",)

    def __init__(self) -> None:
        #: it is of no use any more; what is in flight there may never end
        self.abandoned: bool = False


class HorovodCompletion(Polled):
    """One call of Horovod's, with a handle once it has entered, and what is to be done with its result."""

    over: bool = False
    attended: bool = False
    urgent: bool = True
    #: Horovod answers once in a cycle, and looking often takes the processor from its own thread.
    lateness: float | None = 1 / 32
    _watched = False

    def __init__(
        self,
        call: Callable[..., int],
        arguments: tuple[object, ...],
        common: Common,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._call = call
        self._arguments = arguments
        self._handle: int | None = None
        self._common = common
        self._finish = finish
        self._started = monotonic()
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Issue the call, unless it was given up before its turn; on a thread that may wait."""
        is_running()  # its lock is free now
        self._look()
        with self._lock:
            if self.over:
                return
            try:
                self._handle = handle = self._call(*self._arguments)
                # What enters just as Horovod's thread ends is in none of the queues that it has emptied.
                if not is_running() and not poll(handle):
                    raise RuntimeError("Horovod has been shut down")
            except Exception as error:  # raised in the waiter, which has made the call
                self._close(typed(error))

    def expected(self) -> float:
        return 0.0

    def done(self) -> bool:
        # Callbacks may take locks that the caller holds: with any, only poll() ends it.
        return self.over or (self._callbacks is None and self._look())

    def _look(self) -> bool:
        """Ask Horovod, unless another thread is asking; whether it is over."""
        if self.over or self._lock.locked():
            return self.over
        with self._lock:  # not acquire(False): Ctrl-C as that returns would leave the lock held
            try:
                if self.over:  # another thread has looked meanwhile
                    pass
                elif self._common.abandoned:  # the handle may be another operation's by now
                    self._close(AbortedError("given up with the operation in flight"))
                elif (handle := self._handle) is not None and poll(handle):
                    self._end(handle)
            except ValueError:  # Horovod was shut down here, and has forgotten its handles
                self._close(AbortedError("Horovod was shut down with the operation in flight"))
        return self.over

    def _end(self, handle: int) -> None:
        """Take the result, which is there."""
        error: CollectiveError | None = None
        try:
            clear(handle)
            if self._finish is not None:
                self._finish()
        except CollectiveError as ours:
            error = ours
        except (RuntimeError, ValueError) as native:
            error = typed(native)
        self._close(error)

    def _close(self, error: CollectiveError | None) -> None:
        self._error = error
        self._arguments, self._finish = (), None
        self.over = True

    def poll(self) -> bool:
        return self._look() and self._told()

    def _told(self) -> bool:
        if self._callbacks is not None:
            self._tell()
        return True

    def wait(self, seconds: float) -> bool:
        if self.poll():
            return self.over
        self.attended = True  # the thread leaves it alone, unless it is looking just now
        try:
            return self._wait(monotonic() + seconds)
        finally:
            self.attended = False

    def _wait(self, deadline: float) -> bool:
        while not self.poll():
            now = monotonic()
            if now >= deadline:
                return False
            late = (now - self._started) * (self.lateness or 0.0)
            nap = min(max(late, SHORTEST_NAP_SECONDS), LONGEST_NAP_SECONDS)
            time.sleep(min(nap, deadline - now))
        return self.over

    def add_callback(self, callback: Callback) -> None:
        # Only now the thread has to look: Horovod moves the data by itself. Without the lock, either the
        # thread that ends it sees the callback, or we see that it has ended.
        callbacks = self.__dict__.setdefault("_callbacks", [])
        callbacks.append(callback)
        if self.over:
            self._tell()
        elif not self._watched:
            self._watched = True
            progress.watch(self)
            progress.rouse()

    def writing(self) -> bool:
        # Horovod takes back nothing that was given up.
        return not self.over or isinstance(self._error, AbortedError)

"""How a call enters Horovod, and when it is over: a waiter or the progress thread asks ``poll``.

Horovod moves the data on a thread of its own, so no thread has to poll until one waits for the call.

If process sets are made while the job runs, Horovod's thread meets the other ranks in every cycle, and holds
the lock of its table of process sets meanwhile. A call takes that lock with the GIL held. So one rank that is
stopped or cut off would block every thread of the others for good, before any of them could be told. Hence
calls enter on a thread that first asks for Horovod's lock without the GIL.

The function that Horovod's ``synchronize`` calls spins until the operation is over. So it is called only once
``poll`` has said so. It then forgets the handle, or raises.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from time import monotonic

from horovod.torch.mpi_ops import _basics, mpi_lib

from asynccoll.backends.api import (
    LONGEST_NAP_SECONDS,
    SHORTEST_NAP_SECONDS,
    Callback,
    Polled,
    locks,
    progress,
)
from asynccoll.backends.horovod.failures import typed
from asynccoll.errors import AbortedError, CollectiveError

poll: Callable[[int], bool] = mpi_lib.horovod_torch_poll
clear: Callable[[int], object] = mpi_lib.horovod_torch_wait_and_clear


#: Room for more ranks than any job has, since their number may change (elastic jobs).
_RANKS = (ctypes.c_int * 65_536)()


def is_running() -> bool:
    """Whether Horovod's thread takes calls. Waits for its lock without the GIL."""
    return bool(_basics.MPI_LIB_CTYPES.horovod_process_set_ranks(0, _RANKS) == 0)


class Common:
    """What the operations of one communicator have in common."""

    __slots__ = ("abandoned",)

    def __init__(self) -> None:
        #: whether the communicator was given up; what is in flight on it may never end
        self.abandoned: bool = False


class HorovodCompletion(Polled):
    """One call to Horovod: its handle, once it has entered, and what is to be done with its result."""

    over: bool = False
    attended: bool = False
    urgent: bool = True
    #: Horovod completes calls once in a cycle, and frequent polling takes the processor from its thread.
    lateness: float | None = 1 / 32
    _watched = False
    _cleared: list[object] | None = None  # not empty once Horovod has forgotten the handle

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
        self._lock = locks.Lock()

    def enter(self) -> None:
        """Issue the call, unless it was given up before its turn. Runs on a thread that may wait."""
        is_running()  # returns once Horovod's lock is free
        self._look()
        with self._lock:
            if self.over:
                return
            try:
                self._handle = handle = self._call(*self._arguments)
                # A call that enters just as Horovod's thread ends comes after the thread emptied its queues.
                if not is_running() and not poll(handle):
                    raise RuntimeError("Horovod has been shut down")
            except Exception as error:  # for the waiter, which has made the call, to raise
                self._close(typed(error))

    def expected(self) -> float:
        return 0.0

    def done(self) -> bool:
        # Callbacks may take locks that the caller holds. So if there are any, only poll() looks.
        return self.over or (self._callbacks is None and self._look())

    def _look(self) -> bool:
        """Ask Horovod, unless another thread is asking; return whether the call is over."""
        if self.over or self._lock.locked():
            return self.over
        with self._lock:  # not acquire(False): Ctrl-C as that returns would leave the lock held
            try:
                if self.over:  # another thread has found the end since the check above
                    pass
                elif self._common.abandoned:  # the handle may be another operation's by now
                    self._close(AbortedError("given up with the operation in flight"))
                elif (handle := self._handle) is not None and (self._cleared or poll(handle)):
                    self._end(handle)
            except ValueError:  # Horovod was shut down here, and has forgotten its handles
                self._close(AbortedError("Horovod was shut down with the operation in flight"))
        return self.over

    def _end(self, handle: int) -> None:
        """Take the result of the call, which is over. After Ctrl-C, the next look does what remains."""
        error: CollectiveError | None = None
        try:
            if not self._cleared:
                self._cleared = []
                # Within one call of C: Ctrl-C comes before the handle is cleared, or once that is noted.
                self._cleared.extend(map(clear, (handle,)))
            if self._finish is not None:
                self._finish()
        except CollectiveError as ours:
            error = ours
        except (RuntimeError, ValueError) as native:
            error = typed(native)
        self._close(error)

    def _close(self, error: CollectiveError | None) -> None:
        self._error = error
        self.over = True
        self._arguments, self._finish = (), None

    def poll(self) -> bool:
        return self._look() and self._told()

    def _told(self) -> bool:
        if self._callbacks is not None:
            self._tell()
        return True

    def wait(self, seconds: float) -> bool:
        if self.poll():
            return self.over
        self.attended = True  # the progress thread leaves it alone, unless it is polling right now
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
        # Only now the progress thread has to poll: Horovod moves the data by itself. The lock is not needed:
        # either the thread that ends the call sees the callback, or this thread sees that it has ended.
        callbacks = self.__dict__.setdefault("_callbacks", [])
        callbacks.append(callback)
        if self.over:
            try:
                callbacks.remove(callback)  # leaves the others, which may take locks that the caller holds
            except ValueError:  # the thread that found the end has called it
                return
            callback()
        elif not self._watched:
            self._watched = True
            progress.watch(self)
            progress.rouse()

    def writing(self) -> bool:
        return not self.over or (isinstance(self._error, AbortedError) and self._is_in_flight())

    def _is_in_flight(self) -> bool:
        """Whether Horovod, which does not cancel what was given up, still has it. In doubt, it does.

        After a restart of Horovod (elastic jobs) the handle may be another call's, until that is over.
        """
        try:
            return self._handle is not None and not poll(self._handle)
        except ValueError:  # Horovod was shut down, and has forgotten its handles
            return False

"""Calls enter Horovod on a thread of their own, which can wait for Horovod's lock and hold nobody up.

Where process sets are made while the job runs, Horovod's own thread meets the other ranks in every cycle,
and meanwhile holds the lock of its table of process sets. A call takes that lock, with the interpreter's in
hand: one rank that is stopped, or cut off, would so stop every thread of the others for good, before anyone
can be told. Hence Horovod's lock is first asked for by a function that lets go of the interpreter's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from horovod.torch.mpi_ops import _basics

__all__ = ["entrance"]


class Entrance:
    """The calls that have yet to enter, in order, and their thread, which starts with the first."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def enter(self, call: Callable[[], object]) -> None:
        """Have ``call`` called, after those before it, when Horovod's lock is free."""
        self._calls.put(call)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="asynccoll-horovod", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        wait_for_lock = _basics.MPI_LIB_CTYPES.horovod_number_of_process_sets
        while True:
            call = self._calls.get()
            wait_for_lock()
            call()
            del call  # and what it works on, while waiting for the next one


entrance: Entrance = Entrance()

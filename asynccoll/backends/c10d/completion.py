"""The completions of c10d's works: one kind for works whose end the host sees, one for a device's stream."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from asynccoll.backends.api import Completion

MILLISECOND = timedelta(milliseconds=1)
#: In effect no timeout. A native call without a timeout would take the one that its group was made with.
NEVER = timedelta(days=3650)
#: The timeouts that waiters use all the time: making a timedelta takes as long as a wait for a finished work.
_LIMITS = {seconds: timedelta(seconds=seconds) for seconds in (0.001, 0.1)}


def _over() -> bool:
    return True


class HostCompletion(Completion):
    """A c10d work whose end the host can see (gloo)."""

    __slots__ = ("_future", "_work", "done", "fine")

    def __init__(self, work: Any) -> None:
        # Dropped once it has succeeded: the work holds the tensors, and a lane keeps this object for longer.
        self._work = work
        self._future: Any = None
        self.fine = False
        self.done: Callable[[], bool] = work.is_completed  # not wrapped in a method, to save a call each time

    def writing(self) -> bool:
        return not self.done()

    def wait(self, seconds: float) -> bool:
        limit = _LIMITS.get(seconds) or timedelta(seconds=max(seconds, 0.001))  # 0 would be no timeout
        work = self._work
        if work is None:
            return True
        try:
            work.wait(limit)
        except RuntimeError:  # either the operation failed, which error() returns, or the time has passed
            return bool(self.done())
        self.fine: bool = True
        self.done = _over  # since not every backend's work says that it is completed
        self._work = self._future = None
        return True

    def add_callback(self, callback: Callable[[], object]) -> None:
        work = self._work
        if work is None:
            callback()
            return
        future = work.get_future()

        def fired(_: object) -> None:
            # The work says that it is done only after its future's callbacks have run.
            if not self.fine:
                self._future = future
                self.done = future.done  # see above
            callback()

        future.add_done_callback(fired)

    def error(self) -> BaseException | None:
        future, work = self._future, self._work
        if self.fine or work is None:
            return None
        try:
            if future is not None:
                future.value()
            else:
                work.wait(MILLISECOND)
        except RuntimeError as error:
            return error
        self.fine = True
        self.done = _over  # as in wait
        self._work = self._future = None
        return None


class StreamCompletion(Completion):
    """A c10d work that is ordered by the device's stream (nccl): it counts as done when it is issued.

    ``synchronize`` makes the current stream wait for it, but not the host, unless nccl's groups are told to
    (``TORCH_NCCL_BLOCKING_WAIT``).
    """

    __slots__ = ("_captured", "work")

    stream_ordered = True

    def __init__(self, work: object) -> None:
        self.work: Any = work
        self._captured = torch.cuda.is_current_stream_capturing()  # then it runs only when the graph does

    def done(self) -> bool:
        return True

    def landed(self) -> bool:
        if self._captured:
            return True
        # CUDA must not be asked while a graph is captured: that would end the capture.
        return not torch.cuda.is_current_stream_capturing() and bool(self.work.is_completed())

    def wait(self, seconds: float) -> bool:
        return True

    def add_callback(self, callback: Callable[[], object]) -> None:
        callback()

    def error(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        self.work.wait()

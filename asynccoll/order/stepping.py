"""Programs that are driven by their own waiter, because it waits immediately.

Normally a program's next call is issued by the callback of the previous one's completion, on the thread that
completes it, since the user may begin to wait late. That costs wake-ups across threads at every step. If a
waiter is likely to wait immediately (an object is awaited where it is sent), or says so (``waiting``), it
waits for the native step itself and drives the lane from there, in the lane's order. If the waiter gives up,
or does not begin to wait within the grace period of the progress thread, the completions take over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from asynccoll import host
from asynccoll.transport.completion import Completion, Promise
from asynccoll.transport.progress import progress

#: True while the caller waits for each operation that it starts before it does anything else.
waiting: ContextVar[bool] = ContextVar("asynccoll_waiting", default=False)


class Driven(Protocol):
    """The job whose promise a ``Stepping`` is."""

    driven: bool
    step: Completion | None

    def let_go(self) -> None:
        """Drop the job's references: it is over."""


class Stepping(Promise):
    """The promise of a job that its waiter drives."""

    __slots__ = ("_drive", "_job", "_last", "attended")

    # The progress thread polls the promise once, after the grace period, which hands it to the completions.
    urgent = False
    lateness = None

    def __init__(self, job: Driven, drive: Callable[[], object]) -> None:
        super().__init__()
        self._job = job
        self._drive = drive
        self._last: Completion | None = None
        self.attended: bool = False

    def wait(self, seconds: float) -> bool:
        self.attended = True
        try:
            return self._step(seconds)
        finally:
            self.attended = False

    def _step(self, seconds: float) -> bool:
        deadline = host.monotonic() + seconds
        while not self._done:
            step = self._last or self._job.step
            left = max(0.0, deadline - host.monotonic())
            if step is None or not step.blockable or not self._job.driven:
                self.hand_over()
                return super().wait(left)
            if not step.wait(left):
                return self._done  # if this waiter gives up, the progress thread notices
            if step is self._last:
                self.settle(step.error())
                continue
            self._drive()
            if not self._done and step is (self._last or self._job.step):
                self.hand_over()  # another thread drives, or the lane has given the job up
        return True

    def settle(self, error: BaseException | None = None) -> None:
        self._job.let_go()  # before waiters are woken, so that they find nothing kept alive
        super().settle(error)

    def follow(self, completion: Completion) -> None:
        if self._job.driven and not completion.done():
            self.source: Completion | None = completion
            self._last = completion
            if self._job.driven:
                return
        super().follow(completion)

    def add_callback(self, callback: Callable[[], object]) -> None:
        self.hand_over()
        super().add_callback(callback)

    def offer(self) -> None:
        """Leave the driving to the waiter for the grace period; hand over now if a waiter cannot block."""
        step = self._last or self._job.step
        if step is None or not step.blockable or step.done():
            self.hand_over()
        else:
            progress.watch(self)

    @property
    def finished(self) -> bool:
        """Whether the progress thread has nothing left to do for it."""
        return self._done or not self._job.driven

    def expected(self) -> float:
        """Return 0.0, the seconds of polling without naps: one poll is enough."""
        return 0.0

    def poll(self) -> bool:
        """Hand over to the completions, as no waiter has driven the program within the grace period."""
        self.hand_over()
        return True

    def hand_over(self) -> None:
        """Let completions drive the lane from now on, including that of the step in flight."""
        if not self._job.driven:
            return
        try:
            self._job.driven = False  # first: a step that starts now either sees this, or is seen below
            if self._last is not None:
                super().follow(self._last)
            elif self._job.step is not None:
                self._job.step.add_callback(self._drive)
        except BaseException:  # Ctrl-C: nothing may drive it now; handing over twice does no harm
            self._job.driven = True
            progress.watch(self)
            raise

"""The simulated transports: how their calls complete, and what their backends support.

Every call is a promise that ``delivery`` settles. What the library sees of it depends on the backend: gloo
calls back, MPI and Horovod must be polled, threads block until torch_xla is done, and nccl says at the call
that it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asynccoll import host
from asynccoll.backends.api import (
    LONGEST_NAP_SECONDS,
    Callback,
    Capabilities,
    Completion,
    Promise,
    Transfer,
    Waiters,
    progress,
)
from asynccoll.backends.choosing import capabilities_of
from asynccoll.testing.device import Device
from asynccoll.transport import progress as progressing

__all__ = ["TRANSPORTS", "Pace", "Transport"]

#: From a call's promise and the name of its communicator, the completion that the library gets.
Over = Callable[[Promise, str], Completion]
#: Calls a function within so many seconds from now, in the thread of the rank's network card.
Within = Callable[[float, Callable[[], object]], object]


@dataclass(frozen=True)
class Transport:
    """One transport; ``ends_alone`` and ``orders_lanes`` are as in ``Backend``."""

    backend: str
    #: from a rank's device and network card, how its calls complete
    over: Callable[[Device, Within], Over]
    device: str = "cpu"
    ends_alone: bool = False
    orders_lanes: bool = False
    #: collectives within a node go through shared memory, by the code of the real backend
    in_memory: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """The row of the real backend, without what this transport lacks."""
        row = capabilities_of(self.backend, self.device)
        cpu = frozenset({"cpu"})
        return replace(row, backend="simulated", devices=cpu, sparse=False, hop_bytes=0, built_of=())


class Asked(Completion):
    """A call that is over once it is polled, by a waiter in place or by the progress thread.

    A poll before the call has landed changes nothing, so nobody polls in vain: whoever would be napping
    between polls then is woken within the nap that it would have been taking.
    """

    attended: bool = False

    def __init__(self, promise: Promise, within: Within, *, urgent: bool, lateness: float | None) -> None:
        self.finished: bool = False
        self.urgent = urgent
        self.lateness = lateness
        self.promise: Promise = promise
        self._within = within
        self._issued = host.monotonic()
        self._due = host.Event()  # set when the next poll is due that finds the call over
        self._callbacks: list[Callback] = []
        promise.add_callback(self._has_landed)
        progress.watch(self)

    def _has_landed(self) -> None:
        self._within(min(host.monotonic() - self._issued, LONGEST_NAP_SECONDS), self._is_due)

    def _is_due(self) -> None:
        self._due.set()
        self._rouse()

    def _rouse(self) -> None:
        """Have the progress thread poll, unless a waiter does."""
        if not self.finished and not self.attended and self.promise.done():
            progress.rouse()

    def expected(self) -> float:
        return 0.0

    def poll(self) -> bool:
        if not self.finished and self.promise.done():
            self.finished = True
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
        return self.finished

    def done(self) -> bool:
        return self.finished or (not self._callbacks and self.poll())

    def wait(self, seconds: float) -> bool:
        self.attended = True
        try:
            return self.poll() or (self._due.wait(seconds) and self.poll())
        finally:
            self.attended = False
            self._rouse()

    def add_callback(self, callback: Callback) -> None:
        if self.finished:
            callback()
            return
        self._callbacks.append(callback)
        progress.rouse()

    def error(self) -> BaseException | None:
        return self.promise.error()

    def writing(self) -> bool:
        return not self.promise.done()


class Pace(progressing._Pace):
    """The pace of a progress thread that rests while all that it would poll is yet to land."""

    def nap(self, watched: Sequence[progressing._Watched], now: float) -> float:
        items = [one.item for one in watched]
        if items and all(isinstance(one, Asked) and not one.promise.done() for one in items):
            return math.inf
        return super().nap(watched, now)


class Launched(Completion):
    """A call that is done for the host as soon as it is issued, while the device lags behind."""

    stream_ordered = True

    def __init__(self, promise: Promise, device: Device) -> None:
        self._promise = promise
        self._patience_seconds = device.patience_seconds
        #: settled once the call has landed, or the library has given it up
        self._ends = Promise()
        self._ends.follow(promise)
        device.launch(promise)

    def done(self) -> bool:
        return True

    def landed(self) -> bool:
        return self._promise.done()

    def wait(self, seconds: float) -> bool:
        return True

    def add_callback(self, callback: Callback) -> None:
        callback()

    def error(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        # There is no device: this thread computes what depends on the call, so it must wait for it. A real
        # thread would not block here, but go on to issue calls that others may wait for, or settle that this
        # one is lost. So the wait ends when the library gives the call up; and it is bounded, as torch's
        # watchdog aborts what is in flight for too long.
        if not self._ends.wait(self._patience_seconds):
            raise RuntimeError(
                f"the device has been behind for {self._patience_seconds} s: aborted by its watchdog"
            )
        if (error := self._ends.error()) is not None:
            raise RuntimeError(str(error)) from error

    def abandon(self) -> None:
        self._ends.settle(RuntimeError("the call was given up before the device had run it"))


def _told(device: Device, within: Within) -> Over:
    return lambda promise, name: promise


def _asked(device: Device, within: Within) -> Over:
    return lambda promise, name: Asked(promise, within, urgent=False, lateness=None)


def _asked_at_once(device: Device, within: Within) -> Over:
    return lambda promise, name: Asked(promise, within, urgent=True, lateness=1 / 32)


def _waited_for(device: Device, within: Within) -> Over:
    waiters = Waiters("asynccoll-simulated")

    def over(promise: Promise, name: str) -> Completion:
        outer = Transfer()

        def job() -> Any:
            promise.wait(math.inf)
            outer.settle(promise.error())

        waiters.submit(name, job)
        return outer

    return over


def _launched(device: Device, within: Within) -> Over:
    return lambda promise, name: Launched(promise, device)


TRANSPORTS = {
    "gloo": Transport("gloo", _told),
    "memory": Transport("gloo", _told, in_memory=True),
    "mpi": Transport("mpi", _asked, ends_alone=True),
    "horovod": Transport("horovod", _asked_at_once),
    "xla": Transport("xla-tpu", _waited_for, device="cpu"),
    "nccl": Transport("nccl", _launched, device="cuda", ends_alone=True, orders_lanes=True),
}

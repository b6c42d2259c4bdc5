"""The transports there are: how their calls are over, and what their backends can do.

Every call is a promise that the delivery keeps. What a backend tells of it differs: gloo calls back, MPI and
Horovod must be asked, torch_xla is waited for by threads, and nccl says at once that it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asynccoll import host
from asynccoll.backends.api import (
    LONGEST_NAP_SECONDS,
    SHORTEST_NAP_SECONDS,
    Callback,
    Capabilities,
    Completion,
    Promise,
    Waiters,
    progress,
)
from asynccoll.backends.choosing import capabilities_of
from asynccoll.testing.device import Device

__all__ = ["TRANSPORTS", "Transport"]

#: From the promise of a call, and the name of its communicator, what the library gets.
Over = Callable[[Promise, str], Completion]


@dataclass(frozen=True)
class Transport:
    """One of them; the fields after ``device`` are those of ``Backend``."""

    backend: str
    #: how the calls of one rank are over
    over: Callable[[Device], Over]
    device: str = "cpu"
    ends_alone: bool = False
    orders_lanes: bool = False
    #: collectives of ranks of one node go by memory that they share, by the code of the real backend
    in_memory: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """The row of the real one, but for what this transport has not got."""
        row = capabilities_of(self.backend, self.device)
        cpu = frozenset({"cpu"})
        return replace(row, backend="simulated", devices=cpu, sparse=False, hop_bytes=0, built_of=())


class Asked(Completion):
    """Over once somebody looks: who waits in place, or the progress thread."""

    attended: bool = False

    def __init__(self, promise: Promise, *, urgent: bool, lateness: float | None) -> None:
        self.finished: bool = False
        self.urgent = urgent
        self.lateness = lateness
        self.promise: Promise = promise
        self._callbacks: list[Callback] = []
        progress.watch(self)

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
            deadline, nap = host.monotonic() + seconds, SHORTEST_NAP_SECONDS
            while not self.poll() and host.monotonic() < deadline:
                host.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP_SECONDS)
        finally:
            self.attended = False
        return self.finished

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


class Launched(Completion):
    """Done for the host as soon as it is issued; the device is behind."""

    stream_ordered = True

    def __init__(self, promise: Promise, device: Device) -> None:
        self._promise = promise
        self._patience_seconds = device.patience_seconds
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
        # What is computed of it is computed by this thread, there being no device: after it. It may be needed
        # elsewhere (it issues calls), and does not wait in life: what is out for too long is aborted there.
        if not self._promise.wait(self._patience_seconds):
            raise RuntimeError(
                f"the device is behind for {self._patience_seconds} s: aborted by its watchdog"
            )
        if (error := self._promise.error()) is not None:
            raise RuntimeError(str(error)) from error


def _told(device: Device) -> Over:
    return lambda promise, name: promise


def _asked(device: Device) -> Over:
    return lambda promise, name: Asked(promise, urgent=False, lateness=None)


def _asked_at_once(device: Device) -> Over:
    return lambda promise, name: Asked(promise, urgent=True, lateness=1 / 32)


def _waited_for(device: Device) -> Over:
    waiters = Waiters("asynccoll-simulated")

    def over(promise: Promise, name: str) -> Completion:
        outer = Promise()

        def job() -> Any:
            promise.wait(math.inf)
            outer.settle(promise.error())

        waiters.submit(name, job)
        return outer

    return over


def _launched(device: Device) -> Over:
    return lambda promise, name: Launched(promise, device)


TRANSPORTS = {
    "gloo": Transport("gloo", _told),
    "memory": Transport("gloo", _told, in_memory=True),
    "mpi": Transport("mpi", _asked, ends_alone=True),
    "horovod": Transport("horovod", _asked_at_once),
    "xla": Transport("xla-tpu", _waited_for, device="cpu"),
    "nccl": Transport("nccl", _launched, device="cuda", ends_alone=True, orders_lanes=True),
}

"""Back-pressure: operations start while what is in flight has room for them.

Communication that is slower than the compute which feeds it piles up: every operation that is in flight holds
its buffers. A window bounds that. Who waits is decided by sizes and order alone, so ranks that make the
same calls make them in the same order still.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from asynccoll import host
from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError
from asynccoll.host.misfits import check, check_function, fitting
from asynccoll.waiting.work import Work

__all__ = ["InFlight"]


class InFlight:
    """Starts operations, the oldest of which are waited for once they are too many bytes.

    >>> async with ac.overlap.InFlight(max_in_flight_bytes=64 << 20) as window:
    ...     for x in tensors:
    ...         works.append(await window.start(ac.all_reduce, x, op="avg"))

    ``start`` waits, the oldest first, until ``x`` fits beside what is in flight, then calls and returns the
    ``Work``. An operation larger than the limit goes alone. Sizes are of what this rank passes: the tensors
    in ``x``. Leaving the block waits for what is in flight, and raises the first error of these;
    ``with`` and ``start_blocking`` are the same without an event loop.

    A window belongs to the task (without an event loop, the thread) that starts on it first; once it is
    drained, another may take it. Two that shared one would wait for each other's operations, in an order
    that may differ between ranks.

    Raises:
        InvalidArgumentError: from ``start``, in a task that it does not belong to.
    """

    @fitting
    def __init__(self, max_in_flight_bytes: int) -> None:
        if not isinstance(max_in_flight_bytes, int) or max_in_flight_bytes <= 0:
            raise InvalidArgumentError(
                f"max_in_flight_bytes must be a positive int, got {max_in_flight_bytes!r}"
            )
        self.max_in_flight_bytes = max_in_flight_bytes
        self._out: deque[tuple[Work[object], int]] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._owner: object = None

    def __repr__(self) -> str:
        return f"<InFlight: {len(self._out)} operations, {self._bytes} of {self.max_in_flight_bytes} bytes>"

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of the operations that were started and not waited for here."""
        return self._bytes

    async def start(self, function: Callable[..., Work[object]], x: object, /, **call: object) -> Work[Any]:
        """``function(x, **call)``, once there is room for ``x``."""
        self._claim(_caller())
        _check_function(function)
        size = size_bytes(x)
        for work in self._in_the_way(size):
            try:
                await work
            except Exception as error:
                self._failed(error)
        return self._add(function(x, **call), size)

    def start_blocking(
        self, function: Callable[..., Work[object]], x: object, /, **call: object
    ) -> Work[Any]:
        """The same without an event loop."""
        self._claim(_caller())
        _check_function(function)
        return self.start_by_anyone(function, x, **call)

    def start_by_anyone(self, function: Callable[..., Work[Any]], x: object, /, **call: object) -> Work[Any]:
        """The same, for callers whose threads keep one order by themselves, as those of backward do."""
        size = size_bytes(x)
        for work in self._in_the_way(size):
            try:
                work.wait()
            except Exception as error:
                self._failed(error)
        return self._add(function(x, **call), size)

    def _claim(self, caller: object) -> None:
        """Have the window be this caller's, unless it is another's that has operations in it."""
        if self._owner is not caller and self._out and self._owner is not None:
            raise InvalidArgumentError(
                f"{self!r} belongs to {self._owner!r}, and {caller!r} shares it: ranks whose tasks take "
                "turns in another order would wait for each other. Make an InFlight for each task"
            )
        self._owner = caller

    def _in_the_way(self, size: int) -> Iterator[Work[object]]:
        """The works to wait for before ``size`` more bytes fit; each is off the list once it is over."""
        while self._out and self._bytes + size > self.max_in_flight_bytes:
            work, own = self._out[0]
            yield work
            self._out.popleft()
            self._bytes -= own

    def _add(self, work: Work[object], size: int) -> Work[object]:
        check("what InFlight starts", work, Work, "a function that returns a Work")
        self._out.append((work, size))
        self._bytes += size
        return work

    def _failed(self, error: Exception) -> None:
        if isinstance(error, CollectiveTimeoutError):
            raise error  # it is still in flight
        self._error = self._error or error

    # Leaving

    async def drain(self) -> None:
        """Wait for all that is in flight; the first error of any operation so far is raised."""
        for work in self._in_the_way(self.max_in_flight_bytes + 1):
            try:
                await work
            except Exception as error:
                self._failed(error)
        self._raise()

    def wait(self) -> None:
        """The same without an event loop."""
        for work in self._in_the_way(self.max_in_flight_bytes + 1):
            try:
                work.wait()
            except Exception as error:
                self._failed(error)
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def __aenter__(self) -> InFlight:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.drain()
        else:
            self._detach()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._detach()

    def _detach(self) -> None:
        """The block has an error of its own, which is not to wait for what is in flight."""
        for work, _ in self._out:
            work.detach()


def _check_function(function: object) -> None:
    instead = "write start(ac.all_reduce, x)"
    check_function("what InFlight starts", function, "a function and its argument", instead)


def _caller() -> object:
    """The running task of asyncio or trio, or else the thread."""
    if asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return task
    if "trio" in sys.modules:
        import trio

        try:
            return trio.lowlevel.current_task()
        except RuntimeError:
            pass
    return host.current_thread()


def size_bytes(x: object) -> int:
    """The bytes of the tensors in ``x``."""
    if isinstance(x, torch.Tensor):
        return x.numel() * x.element_size()
    if isinstance(x, Mapping):
        return sum(size_bytes(leaf) for leaf in x.values())
    if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
        return sum(size_bytes(leaf) for leaf in x)
    return 0

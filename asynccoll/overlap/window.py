"""Back-pressure: operations start only while few enough bytes are in flight.

If communication is slower than the compute that feeds it, operations pile up, and each holds its buffers. A
window bounds their bytes. Which calls wait depends only on sizes and order, so ranks that make the same calls
still make them in the same order.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from asynccoll import host
from asynccoll.errors import AsyncCollError, InvalidArgumentError, still_pending
from asynccoll.host.misfits import check, check_count, check_function, fitting
from asynccoll.overlap.steps import Steps, run, run_blocking
from asynccoll.plan.trees import flatten
from asynccoll.waiting.work import Work

__all__ = ["InFlight"]


class InFlight:
    """Starts operations, and first waits for the oldest ones if too many bytes would be in flight.

    >>> async with ac.overlap.InFlight(max_in_flight_bytes=64 << 20) as window:
    ...     for x in tensors:
    ...         works.append(await window.start(ac.all_reduce, x, op="avg"))

    ``start`` waits for operations in flight, the oldest first, until the bytes of ``x`` fit under the limit,
    then calls the function and returns its ``Work``. An operation larger than the limit runs alone. The size
    is that of the tensors in ``x`` on this rank. Leaving the block waits for the operations in flight, and
    raises the first error; without an event loop, use ``with`` and ``start_blocking``.

    A window belongs to the task (without an event loop, the thread) that first starts an operation on it;
    once it is drained, another may take it. Two tasks that shared one would wait for each other's operations,
    in an order that may differ between ranks.

    Raises:
        InvalidArgumentError: from ``start``, in a task that the window does not belong to.
    """

    @fitting
    def __init__(self, max_in_flight_bytes: int) -> None:
        check_count("max_in_flight_bytes", max_in_flight_bytes)
        self.max_in_flight_bytes = max_in_flight_bytes
        self._out: deque[tuple[Work[object], int]] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._owner: object = None

    def __repr__(self) -> str:
        return f"<InFlight: {len(self._out)} operations, {self._bytes} of {self.max_in_flight_bytes} bytes>"

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of the operations that were started here and not waited for."""
        return self._bytes

    async def start(self, function: Callable[..., Work[object]], x: object, /, **call: object) -> Work[Any]:
        """Wait until there is room for ``x``, and return ``function(x, **call)``."""
        self._claim(_caller())
        _check_function(function)
        size = size_bytes(x)
        await run(self._make_room(size))
        return self._add(function(x, **call), size)

    def start_blocking(
        self, function: Callable[..., Work[object]], x: object, /, **call: object
    ) -> Work[Any]:
        """Do what ``start`` does, without an event loop."""
        self._claim(_caller())
        _check_function(function)
        return self.start_by_anyone(function, x, **call)

    def start_by_anyone(self, function: Callable[..., Work[Any]], x: object, /, **call: object) -> Work[Any]:
        """Do what ``start_blocking`` does, in any thread: callers keep one order, as backward does."""
        size = size_bytes(x)
        run_blocking(self._make_room(size))
        return self._add(function(x, **call), size)

    def _claim(self, caller: object) -> None:
        """Give the window to ``caller``; refuse if another caller has operations in it."""
        if self._owner is not caller and self._out and self._owner is not None:
            raise InvalidArgumentError(
                f"{self!r} belongs to {self._owner!r}, but {caller!r} uses it too: if tasks take turns in "
                "another order on another rank, the ranks wait for each other. Make an InFlight for each "
                "task"
            )
        self._owner = caller

    def _make_room(self, size: int) -> Steps[None]:
        """Wait until ``size`` more bytes fit. A work whose wait was cut short stays on the list.

        The first error is kept for ``_raise``.
        """
        while self._out and self._bytes + size > self.max_in_flight_bytes:
            work, own = self._out[0]
            try:
                yield work
            except Exception as error:
                if still_pending(error):
                    raise
                self._error = self._error or error
            self._out.popleft()
            self._bytes -= own

    def _add(self, work: Work[object], size: int) -> Work[object]:
        check("what InFlight starts", work, Work, "a function that returns a Work")
        self._out.append((work, size))
        self._bytes += size
        return work

    # Leaving

    async def drain(self) -> None:
        """Wait for all operations in flight, then raise the first error of any operation so far."""
        await run(self._make_room(self.max_in_flight_bytes + 1))
        self._raise()

    def wait(self) -> None:
        """Do what ``drain`` does, without an event loop."""
        run_blocking(self._make_room(self.max_in_flight_bytes + 1))
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
        """Do not wait for the operations in flight: the block has an error, which must not be delayed."""
        for work, _ in self._out:
            work.detach()


def _check_function(function: object) -> None:
    instead = "write start(ac.all_reduce, x)"
    check_function("what InFlight starts", function, "a function and its argument", instead)


def _caller() -> object:
    """Return the running task of asyncio or trio, or else the thread."""
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
    """Return the bytes of the tensors in ``x``."""
    try:
        leaves, _ = flatten(x)
    except AsyncCollError:  # the operation will refuse it, so that the peers are told
        return 0
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))

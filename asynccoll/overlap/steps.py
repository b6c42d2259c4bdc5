"""A sequence of waits written once, and driven with an event loop or without one."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Protocol, TypeVar

__all__ = ["Steps", "Waitable", "run", "run_blocking"]

T = TypeVar("T")


class Waitable(Awaitable[Any], Protocol):
    """What can be awaited, and waited for without a loop: a ``Work``, or what imitates one."""

    def wait(self) -> Any:
        """Its result, without an event loop."""


#: Yields what is to be waited for, gets its result back, and returns the result of the whole.
Steps = Generator[Waitable, Any, T]


async def run(steps: Steps[T]) -> T:
    """The result of ``steps``, each wait of which suspends the task."""
    with_result = None
    try:
        while True:
            with_result = await steps.send(with_result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration is not generic
    finally:
        steps.close()


def run_blocking(steps: Steps[T]) -> T:
    """The same, each wait of which blocks the thread."""
    with_result = None
    try:
        while True:
            with_result = steps.send(with_result).wait()
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # StopIteration is not generic
    finally:
        steps.close()

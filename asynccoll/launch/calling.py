"""How a rank calls the function that it was started for, plain or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from asynccoll.errors import InvalidArgumentError

__all__ = ["complete"]


def complete(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``function`` returns; of an async one what its coroutine does, run by ``asyncio.run``.

    Raises:
        InvalidArgumentError: it is async, and an event loop runs here already.
    """
    result = function(*args, **kwargs)
    if not inspect.iscoroutine(result):
        return result
    if asyncio._get_running_loop() is None:  # the public one raises, and would be the context of all errors
        return asyncio.run(result)
    result.close()
    raise InvalidArgumentError(
        f"{result.__qualname__} is async, and would be run by asyncio.run, but an event loop runs here "
        "already: start the ranks outside of it, or join the world with ac.initialize() and `await` it here"
    )

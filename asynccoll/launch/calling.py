"""How a rank calls the function that it was started for, plain or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check, misfit


def check_called(function: object, args: object = (), kwargs: object = None) -> None:
    """Refuse what the ranks cannot run: it has to be a function, with a tuple and a dict of arguments."""
    if not callable(function):
        if inspect.iscoroutine(function):
            function.close()
        instead = "pass it without calling it, and its arguments separately"
        raise misfit("what the ranks run", "a function", function, instead)
    check("args", args, (tuple, list), "a tuple", "of one argument write (x,)")
    check("kwargs_dict", kwargs, (Mapping, NoneType), "a dict")


def complete(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what ``function`` returns; the coroutine of an async one is run by ``asyncio.run``.

    Raises:
        InvalidArgumentError: it is async, and an event loop runs here already.
    """
    result = function(*args, **kwargs)
    if not inspect.iscoroutine(result):
        return result
    if asyncio._get_running_loop() is None:  # the public one raises: it would be the context of every error
        return asyncio.run(result)
    result.close()
    raise InvalidArgumentError(
        f"{result.__qualname__} is async, and would be run by asyncio.run, but an event loop is already "
        "running here: start the ranks outside of it, or join the world with ac.initialize() and `await` "
        "it here"
    )

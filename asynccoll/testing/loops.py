"""The event loops that ``simulate`` has, and what each needs to be the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from asynccoll.errors import InvalidArgumentError
from asynccoll.testing.asyncio_loop import run_asyncio
from asynccoll.testing.scheduler import Scheduler
from asynccoll.testing.trio_loop import ordered, run_trio

__all__ = ["LOOPS"]


class _Loop(NamedTuple):
    """How ``main`` is run on one rank, and what is put around all of them."""

    run: Callable[[Scheduler, Coroutine[Any, Any, Any]], Any]
    around: Callable[[int], AbstractContextManager[None]] = lambda seed: nullcontext()
    #: tasks of killed ranks protest when they are freed: that is to be done, and not to be heard
    protests: bool = False


def _run_none(scheduler: Scheduler, main: Coroutine[Any, Any, Any]) -> Any:
    main.close()
    raise InvalidArgumentError('main is a coroutine function: say loop="asyncio" or loop="trio"')


LOOPS = {
    "asyncio": _Loop(run_asyncio),
    "trio": _Loop(run_trio, ordered, protests=True),
    "none": _Loop(_run_none),
}

"""The event loops that ``simulate`` supports, and what each needs to be deterministic."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

from asynccoll.errors import InvalidArgumentError
from asynccoll.testing.asyncio_loop import run_asyncio
from asynccoll.testing.processes import exchanged
from asynccoll.testing.scheduler import Scheduler
from asynccoll.testing.trio_loop import ordered, run_trio
from asynccoll.waiting import loops

__all__ = ["LOOPS"]


class _Loop(NamedTuple):
    """How ``main`` is run on one rank, and a context manager that is put around all ranks."""

    run: Callable[[Scheduler, Coroutine[object, object, object]], object]
    around: Callable[[int], AbstractContextManager[None]] = lambda seed: nullcontext()


def _run_none(scheduler: Scheduler, main: Coroutine[object, object, object]) -> object:
    main.close()
    raise InvalidArgumentError('main is a coroutine function: pass loop="asyncio" or loop="trio"')


@contextmanager
def _with_or_without_trio(seed: int) -> Iterator[None]:
    """Run every second pair of seeds as if trio were not imported: an await takes a shorter path then."""
    if seed // 2 % 2:
        yield
    else:
        with exchanged(loops, ("sys",), SimpleNamespace(sys=SimpleNamespace(modules={}))):
            yield


LOOPS = {
    "asyncio": _Loop(run_asyncio, _with_or_without_trio),
    "trio": _Loop(run_trio, ordered),
    "none": _Loop(_run_none),
}

"""Simulated threads in place of those that anyio's and trio's ``to_thread`` would start."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import anyio

from asynccoll.testing.scheduler import running

__all__ = ["worker_threads"]


@contextlib.contextmanager
def worker_threads() -> Iterator[None]:
    """Use simulated threads for the block, in place of anyio's worker threads on asyncio, and of trio's."""
    from anyio._backends._asyncio import AsyncIOBackend

    real = AsyncIOBackend.run_sync_in_worker_thread
    with contextlib.ExitStack() as stack:
        replaced = classmethod(partial(_on_asyncio, real))
        stack.enter_context(patch.object(AsyncIOBackend, "run_sync_in_worker_thread", replaced))
        if find_spec("trio") is not None:
            threads = import_module("trio._threads")
            start = partial(_started, threads.start_thread_soon)
            stack.enter_context(patch.object(threads, "start_thread_soon", start))
        yield


async def _on_asyncio(
    real: Any, cls: object, func: Callable[..., object], args: Any, **options: object
) -> Any:
    import asyncio

    if running() is None:
        return await real(func, args, **options)
    await anyio.lowlevel.checkpoint()
    context = contextvars.copy_context()
    if find_spec("sniffio") is not None:  # trio needs it, anyio does not
        context.run(import_module("sniffio").current_async_library_cvar.set, None)
    with anyio.CancelScope(shield=not options.get("abandon_on_cancel", False)):
        return await asyncio.get_running_loop().run_in_executor(None, context.run, func, *args)


def _started(
    real: Any, run: Callable[[], object], deliver: Callable[[object], object], name: str | None = None
) -> None:
    import outcome

    scheduler = running()
    if scheduler is None or scheduler.current is None:
        real(run, deliver, name)
    else:
        scheduler.add(scheduler.current.rank, None, lambda: deliver(outcome.capture(run)))

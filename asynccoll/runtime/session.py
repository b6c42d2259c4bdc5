"""A block for which this process is part of the world: ``initialize`` before it, ``finalize`` after it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from asynccoll.host import actors
from asynccoll.host.endings import is_failure
from asynccoll.runtime.process import current, initialize, leave
from asynccoll.runtime.state import of_thread
from asynccoll.world.context import Context


class session:  # noqa: N801  # read as a statement: `async with ac.session():`
    """A block between ``initialize`` and ``finalize``; the arguments are those of ``initialize``.

    ``async with``, on asyncio or trio, joins and leaves in a thread, so that other tasks of the event loop
    keep running while the ranks wait for each other; ``with`` blocks.

    >>> async with ac.session("gloo", timeout=60):
    ...     total = await ac.all_reduce(x)

    If the block raises, the world is left by ``finalize(abort=True)``: nothing is waited for, and the works
    of other ranks that wait for this one fail with ``PeerLostError``, which says what the block raised.

    A cancellation while joining or leaving takes effect once that is done, at the latest after the timeout.
    (asyncio's ``task.cancel()`` does not wait for the thread: call ``finalize`` before joining again.)
    """

    def __init__(self, backend: str | None = None, **options: Any) -> None:
        self._backend = backend
        self._options = options

    def __enter__(self) -> session:
        initialize(self._backend, **self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(error, abort=is_failure(error))

    async def __aenter__(self) -> session:
        import anyio.to_thread

        of_thread.set(await anyio.to_thread.run_sync(self._joined))
        current().liveness.lives_here()  # the program runs in this thread, not in the one that joined
        actors.current()  # as in initialize, which has recorded only the thread in which it ran
        return self

    def _joined(self) -> Context | None:
        """Join; return a thread rank's context, which is set only in this thread's context variables."""
        self.__enter__()
        return of_thread.get()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import anyio.to_thread

        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.__exit__, kind, error, trace)
        finally:
            of_thread.set(None)

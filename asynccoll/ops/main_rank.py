"""Work that one rank does for all: ``is_main``, ``print0``, ``main_first``."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import IO

from asynccoll.errors import AsyncCollError, CollectiveError
from asynccoll.host.misfits import fitting
from asynccoll.ops.collectives import barrier, refuse
from asynccoll.runtime.process import was_rank
from asynccoll.waiting.work import Work


@fitting
def is_main(*, local: bool = False) -> bool:
    """Whether this is rank 0; with ``local=True``, whether it is the first rank of its node.

    After ``finalize()``, whether it was.
    """
    return was_rank(local=local) == 0


@fitting
def print0(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[str] | None = None,
    flush: bool = False,
) -> None:
    """Print on rank 0, as ``print`` does; do nothing elsewhere. Does not wait for other ranks.

    >>> ac.print0(f"epoch {epoch}: {loss:.3f}")
    """
    if is_main():
        print(*values, sep=sep, end=end, file=file, flush=flush)  # the purpose of this function


class main_first:  # noqa: N801  # read as a statement: `with ac.main_first():`
    """A block that rank 0 runs first, and the others once it is done: to download or prepare data.

    With ``local=True`` the first rank of each node goes first, for data on the node's disk; the others follow
    once all of these are done. Every rank enters the block. ``async with`` does not block the event loop.

    >>> async with ac.main_first():
    ...     dataset = load(cache)                     # rank 0 writes the cache, the others read it

    If the block raises on a first rank, the others raise ``PeerRefusedError`` with its reason and do not
    enter. After ``timeout`` seconds (default: the timeout of ``initialize``) the waiting ranks raise
    ``CollectiveTimeoutError``.
    """

    @fitting
    def __init__(self, *, local: bool = False, lane: str | None = None, timeout: float | None = None) -> None:
        self._first = is_main(local=local)
        self._lane = lane
        self._timeout = timeout

    def _meet(self) -> Work[None]:
        return barrier(lane=self._lane, timeout=self._timeout)

    def _failed(self, error: BaseException) -> None:
        """Notify the other ranks that the block failed here, so that they stop waiting."""
        with contextlib.suppress(AsyncCollError):  # the block's own error is the one to be raised
            refuse(
                CollectiveError(f"main_first: the block raised {error!r}"), lane=self._lane, name="main_first"
            )

    def __enter__(self) -> main_first:
        if not self._first:
            self._meet().wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first and error is None:
            self._meet().wait()
        elif self._first and error is not None:
            self._failed(error)

    async def __aenter__(self) -> main_first:
        if not self._first:
            await self._meet()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first and error is None:
            await self._meet()
        elif self._first and error is not None:
            self._failed(error)

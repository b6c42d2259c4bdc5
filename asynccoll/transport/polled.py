"""The base class for completions of libraries that can only be polled (mpi, horovod).

A waiter polls the library in place; without one, the progress thread does (``transport.progress``).
"""

from __future__ import annotations

from asynccoll import host
from asynccoll.errors import CollectiveError
from asynccoll.transport.completion import Callback, Completion


class Polled(Completion):
    """An operation that is polled: the thread that finds it ``over`` calls its callbacks.

    One is created for every operation, so attributes that most never change are defaults of the class.
    """

    over: bool = False
    _callbacks: list[Callback] | None = None
    _error: CollectiveError | None = None

    @property
    def finished(self) -> bool:
        """Whether the progress thread has nothing left to do for it, callbacks included.

        A callback that was added while ``done`` found the end is left to that thread: the callback may take
        locks that the caller of ``done`` holds.
        """
        return self.over and not self._callbacks

    def error(self) -> CollectiveError | None:
        return self._error

    def _tell(self) -> None:
        """Call each callback once, even if another thread is doing the same."""
        host.call_off(self._callbacks or [])

"""What the completions of libraries that can only be polled (mpi, horovod) have in common.

Their waiter asks the library in place, else the progress thread does (``transport.progress``).
"""

from __future__ import annotations

from asynccoll.errors import CollectiveError
from asynccoll.transport.completion import Callback, Completion

__all__ = ["Polled"]


class Polled(Completion):
    """An operation of which a thread finds that it is ``over``, and then calls the callbacks.

    Made for every operation, so what most never change is the class's, not the instance's.
    """

    over: bool = False
    _callbacks: list[Callback] | None = None
    _error: CollectiveError | None = None

    @property
    def finished(self) -> bool:
        """Whether the thread has nothing more to do with it, callbacks included.

        One that was added while ``done`` found the end is left to the thread: it may take locks that the
        caller of ``done`` holds.
        """
        return self.over and not self._callbacks

    def error(self) -> CollectiveError | None:
        return self._error

    def _tell(self) -> None:
        """Call the callbacks, each once, even if another thread is doing so."""
        callbacks = self._callbacks or []
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:  # another thread has taken the last one
                return
            callback()

"""The order of receives from one source with one tag, if a message may consist of two pieces.

Messages of a source and tag are matched in the order of the receives. If only the first piece of a message
tells its size, there is a second piece, and later receives wait until that has been asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asynccoll import host
from asynccoll.transport.completion import READY, Completion, Promise

__all__ = ["Turns"]

#: Source and tag.
Key = tuple[int, int]
#: Asks for a message; settles the promise once all of its pieces have been asked for.
Ask = Callable[[Promise], Completion]


class Turns:
    """Whose turn it is on one lane, by source and tag."""

    __slots__ = ("_asked", "_lock")

    def __init__(self) -> None:
        self._asked: dict[Key, Promise] = {}  # the promise of each key's latest receive, while unsettled
        self._lock = host.Lock()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def take(self, key: Key, ask: Ask) -> Completion:
        """Ask for a message now, or once earlier ones have been asked for. Returns its completion."""
        asked, over = Promise(), Promise()
        asked.add_callback(partial(self._leave, key, asked))
        before: Promise | None = None

        def follow() -> None:
            try:
                over.follow(ask(asked))
            except BaseException as error:  # the receive's waiter gets it, not this thread
                asked.settle()
                over.settle(error)

        try:
            with self._lock:
                before = self._asked.get(key)
                self._asked[key] = asked
            if before is None:
                return ask(asked)
            before.add_callback(follow)
        except BaseException:  # Ctrl-C among them: the turn passes to later receives, when it would have come
            (before or READY).add_callback(asked.settle)
            raise
        return over

    def _leave(self, key: Key, asked: Promise) -> None:
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]

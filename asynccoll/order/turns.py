"""The turns of receives from one source with one tag, where a message comes in more than one piece.

Messages of a source and tag are matched in the order in which they are received. One whose size only its
first piece tells has a second piece, and what is received after it waits until that has been asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asynccoll import host
from asynccoll.transport.completion import Completion, Promise

__all__ = ["Turns"]

#: Which source and tag.
Key = tuple[int, int]
#: Asks for a message; settles the promise once all of its pieces have been asked for.
Ask = Callable[[Promise], Completion]


class Turns:
    """Whose turn it is, by source and tag: of one lane."""

    __slots__ = ("_asked", "_lock")

    def __init__(self) -> None:
        self._asked: dict[Key, Promise] = {}  # the latest of each that is not settled yet
        self._lock = host.Lock()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def take(self, key: Key, ask: Ask) -> Completion:
        """Ask for a message, now or once those before it have been asked for; its completion."""
        asked, over = Promise(), Promise()
        with self._lock:
            before = self._asked.get(key)
            self._asked[key] = asked
        asked.add_callback(partial(self._leave, key, asked))
        if before is None:
            return ask(asked)

        def follow() -> None:
            try:
                over.follow(ask(asked))
            except BaseException as error:  # raised in its waiter, not in this thread
                asked.settle()
                over.settle(error)

        before.add_callback(follow)
        return over

    def _leave(self, key: Key, asked: Promise) -> None:
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]

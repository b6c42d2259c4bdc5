"""The order of receives from one source with one tag, if a message may consist of two pieces.

Messages of a source and tag are matched in the order of the receives. If the size of a message is known only
from its first piece, there is a second piece, and later receives wait until the second has been requested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asynccoll import host
from asynccoll.transport.completion import READY, Completion, Promise

__all__ = ["Turns"]

#: Source and tag.
Key = tuple[int, int]
#: Requests a message; settles the promise once all of the message's pieces have been requested.
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
        """Request a message, now or once earlier ones have been requested. Returns its completion."""
        asked, over = Promise(), Promise()
        asked.add_callback(partial(self._leave, key, asked))
        before: Promise | None = None

        def follow() -> None:
            try:
                over.follow(ask(asked))
            except BaseException as error:  # raised in the waiter of the receive, not in this thread
                asked.settle()
                over.settle(error)

        try:
            with self._lock:
                before = self._asked.get(key)
                self._asked[key] = asked
            if before is None:
                return ask(asked)
            before.add_callback(follow)
        except BaseException:  # including Ctrl-C: later receives get the turn when this one would have had it
            (before or READY).add_callback(asked.settle)
            raise
        return over

    def _leave(self, key: Key, asked: Promise) -> None:
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]

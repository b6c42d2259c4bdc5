"""The order of receives from one source with one tag, if a message may consist of two pieces.

Messages of a source and tag are matched in the order of the receives. If the size of a message is known only
from its first piece, there is a second piece, and later receives wait until the second has been requested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asynccoll import host
from asynccoll.transport.completion import READY, Completion, Promise

#: Source and tag.
Key = tuple[int, int]
#: Requests a message; settles the promise once all of the message's pieces have been requested.
Ask = Callable[[Promise], Completion]


class Turns:
    """Whose turn it is on one lane, by source and tag.

    A receive may fail after earlier pieces were taken, or after a later one was accepted: the next receive
    would then take its message for another. So none is made any more, and ``lose`` gives up the lane.
    """

    __slots__ = ("_asked", "_lock", "_lose", "_lost")

    def __init__(self, lose: Callable[[BaseException], object]) -> None:
        self._lose = lose
        self._lost: BaseException | None = None
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
                if self._lost is not None:
                    raise self._lost
                over.follow(ask(asked))
            except BaseException as error:  # raised in the waiter of the receive, not in this thread
                self.lose(error)
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

    def lose(self, error: BaseException) -> None:
        """Make no receive any more, since a piece of a message could not be requested."""
        if self._lost is None:
            self._lost = error
            self._lose(error)

    def _leave(self, key: Key, asked: Promise) -> None:
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]

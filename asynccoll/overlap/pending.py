"""``Pending``: the result of a method that waits several times. ``await`` it, or call ``wait()``."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from asynccoll.errors import InvalidArgumentError, still_pending
from asynccoll.host.call_site import Spot, caller
from asynccoll.host.timeouts import check_patience
from asynccoll.overlap.steps import Resumable, Sequence, Steps, run, run_blocking
from asynccoll.waiting.forgotten import NotItsResult, warn

__all__ = ["Forgotten", "Methods", "Pending"]

T = TypeVar("T")


class Pending(NotItsResult, Generic[T]):
    """A call of a method, such as an optimizer's step, that begins when it is first waited for.

    - ``await pending``, on asyncio or trio, or ``pending.wait()`` without an event loop, gives the method's
      result, or raises its error. Later waits give the same one; a wait after a cancelled or timed-out one
      continues the call.
    - If it is never waited for, it does nothing: it warns (``UnawaitedWorkWarning``) when it is dropped, and
      the next call on its object, or the next backward, raises ``InvalidArgumentError``. Both name the line
      of the call.
    """

    __slots__ = (
        "__weakref__",
        "_begin",
        "_begun",
        "_called",
        "_cure",
        "_failure",
        "_forgotten",
        "_is_busy",
        "_is_over",
        "_is_told",
        "_result",
        "_spot",
    )

    def __init__(
        self,
        forgotten: Forgotten,
        called: str,
        cure: str,
        begin: Callable[[], Steps[T]],
        is_busy: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> None:
        """``called``: the method, as a user writes it; ``cure``: the code that waits for it.

        ``is_busy``: whether another call is being waited for, so that this one is refused before it begins.
        ``is_over``: whether another call has continued this one to its end.
        """
        self._begun = self._is_told = False
        self._forgotten = forgotten
        self._called = called
        self._cure = cure
        self._begin = begin
        self._is_busy = is_busy
        self._is_over = is_over
        self._result: tuple[T] | None = None
        self._failure: Exception | None = None
        self._spot: Spot = caller()

    def __repr__(self) -> str:
        over = "done" if self._result is not None else "failed" if self._failure is not None else ""
        state = over or ("begun" if self._begun else "not begun")
        return f"<{self._called} at {self._spot.place}: {state}>"

    def __await__(self) -> Generator[object, object, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        if self._result is None:
            with self._beginning():
                self._result = (await run(self._begin()),)
        return self._result[0]

    def wait(self, timeout: float | None = None) -> T:
        """Wait without an event loop, and return the method's result.

        After ``timeout`` seconds ``CollectiveTimeoutError`` is raised; the next wait continues the call.
        """
        check_patience(timeout)
        if self._result is None:
            with self._beginning():
                self._result = (run_blocking(self._begin(), timeout),)
        return self._result[0]

    def done(self) -> bool:
        """Whether a wait would return immediately. Before the first wait the call has not begun."""
        return self._result is not None or self._failure is not None or self._is_over()

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Run the call in the block, unless it has failed before: other ranks would not join a second run."""
        self._begun = True
        if self._failure is not None:
            raise self._failure
        refused = self._is_busy()
        try:
            yield
        except Exception as error:
            if not (refused or still_pending(error)):
                self._failure = error
            raise

    def unawaited(self) -> str:
        """Return the error text, with the cure, if the call was never waited for; else ""."""
        if self._begun:
            return ""
        place = self._spot.place
        return f"{self._called} at {place} was never awaited, and has done nothing: write {self._cure}"

    def _told(self) -> None:
        self._is_told = True

    def __del__(self) -> None:
        try:
            told = self.unawaited()
        except AttributeError:  # Ctrl-C struck in the constructor
            return
        if told:
            self._forgotten.told = told
            if not self._is_told:
                warn(told, self._spot.place)


#: The methods that use no gradients.
_SAVING = ("full_state_dict", "full_optimizer_state")


class Forgotten:
    """The calls of one object's methods that were never waited for, or not until they ended."""

    __slots__ = ("_latest", "left", "told")

    def __init__(self) -> None:
        #: the calls that were begun and have not ended, in their order
        self.left: deque[Sequence] = deque()
        #: the text of the error for a call that was dropped, or ""
        self.told: str = ""
        self._latest: Callable[[], Pending[Any] | None] = _none

    def made(self, pending: Pending[Any]) -> None:
        """Note ``pending`` as the latest call."""
        self._latest = weakref.ref(pending)

    def dropped(self) -> str:
        """Return the error text for a call that was dropped, and clear it; "" if there is none."""
        told, self.told = self.told, ""
        return told

    def last(self) -> str:
        """Return the text as ``dropped`` does, or that for the latest call, if it was never waited for.

        The latest call counts only while it is still referenced.
        """
        told = self.dropped()
        latest = self._latest()
        if told or latest is None:
            return told
        latest._told()
        return latest.unawaited()

    def unfinished(self, wanted: str) -> str:
        """Return the error text for ``wanted``, if a call that uses the gradients has not ended; else "".

        Its wait was cut short, or goes on in another task. A call does not count in its own code (in its
        closure, say).
        """
        left = [one for one in list(self.left) if not one.over]
        if not left or left[0].is_running:
            return ""
        waiting = (one.called for one in left if one.name[0] not in _SAVING)
        return left[0].cut_off or next(
            (_UNFINISHED.format(wanted=wanted, called=called) for called in waiting), ""
        )


_UNFINISHED = (
    "{wanted} before {called} was complete, which uses the earlier gradients: its wait was cut short "
    "(cancelled or timed out), or goes on in another task, and the other ranks complete it. Await {called} "
    "again first; then zero_grad() and the next backward"
)


def _none() -> None:
    """Return None: there was no call yet."""


class Methods(Resumable):
    """The methods of one object that return a ``Pending``."""

    def __init__(
        self,
        of: str,
        name: str,
        whose: str,
        news: Callable[[], object] = lambda: None,
        forgotten: Forgotten | None = None,
    ) -> None:
        """``of``: the object's class; ``name``: the name users give it; ``forgotten``: shared with others."""
        super().__init__(whose, news)
        self._of = of
        self._name = name
        self._forgotten = forgotten or Forgotten()
        self._forgotten.left = self._left

    def check_finished(self, wanted: str) -> None:
        """Refuse ``wanted``, which changes gradients, while a call has yet to use them."""
        if told := self._forgotten.unfinished(wanted):
            raise InvalidArgumentError(told)

    def close(self) -> None:
        """Stop refusing calls because earlier ones were cut short."""
        self._forgotten.left = deque()

    def resumed(self, name: tuple[object, ...], begin: Callable[[], Steps[T]]) -> Pending[T]:
        """Return the call of a method with arguments, ``name``: it continues such a call if it was cut short.

        All waits for it are for the sequence of the first wait, even if other calls have completed that.
        """
        takes = any(given is not None for given in name[1:])
        sequences: list[Sequence] = []

        def steps() -> Steps[T]:
            if not sequences:
                sequences.append(self.called(name, begin))
            return self.through(sequences[0])

        return self._pending(name[0], takes, steps, lambda: any(one.over for one in sequences))

    def pending(self, name: object, begin: Callable[[], Steps[T]]) -> Pending[T]:
        """Return the call of a method whose ``begin`` itself continues where it was cut short."""
        return self._pending(name, False, begin, lambda: False)

    def _pending(
        self, name: object, takes_arguments: bool, begin: Callable[[], Steps[T]], is_over: Callable[[], bool]
    ) -> Pending[T]:
        told = self._forgotten.dropped()
        if told:  # the other ranks are a step ahead, or all ranks have skipped the call
            raise InvalidArgumentError(told)
        call = f".{name}({'...' if takes_arguments else ''})"
        cure = f"`await {self._name}{call}` (or {call}.wait())"
        called = f"{self._of}.{name}()"
        pending = Pending(self._forgotten, called, cure, begin, lambda: self.is_waited_for, is_over)
        self._forgotten.made(pending)
        return pending

"""The communicator of a lane: opened on first use, and replaced after a refusal that left calls half matched.

It must not know what is issued on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.host.helpers import start_once
from asynccoll.transport.completion import Promise

if TYPE_CHECKING:
    from asynccoll.transport.communicator import Communicator

__all__ = ["Connection"]

#: How long to wait for opening threads when the lane is closed.
_GIVE_UP_SECONDS = 5.0


class Connection:
    """A lane's communicators, one after another: each serves one or several epochs (``cut``).

    ``open``, ``replace`` and ``give_up`` are called with the lane's lock held; ``wait``, ``retire``, ``join``
    and ``close`` without it, as they may take long. A helper thread that has opened a communicator takes the
    lock itself.
    """

    def __init__(
        self,
        name: str,
        lock: host.Lock,
        make: Callable[[int], Communicator],
        made: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``make`` returns a communicator for an epoch.

        If a helper thread runs it, that calls ``made`` or ``failed`` afterwards, without the lane's lock.
        """
        self.name = name
        self.lock: host.Lock = lock
        self.communicator: Communicator | None = None
        self._make = make
        self._made = made
        self._failed = failed
        self._epoch = 0
        self._opened_once = Promise()
        self._openers: list[host.Thread] = []  # the latest, and those before it that may still be opening
        self._previous: Communicator | None = None  # the latest one, whose messages the next takes over
        self._retired: list[Communicator] = []  # replaced, but not closed yet
        self._begun = self._given_up = False

    @property
    def has_opened(self) -> bool:
        """Whether the first communicator has been opened, or opening it was given up."""
        return self._opened_once.done()

    def open(self, *, waits: bool) -> None:
        """Open the first communicator, once; on a helper thread if that ``waits`` for the other members."""
        if not self._begun:
            self._open(waits=waits)

    def _open(self, *, waits: bool) -> None:
        if not waits:
            communicator = self._make(self._epoch)
            self._begun = True  # not before: where it could not be made, the next call tries again
            self._install(communicator)
            return
        opener = host.Thread(
            target=self._open_here, args=(self._epoch,), name=f"asynccoll-open-{self.name}", daemon=True
        )
        start_once(opener, self._opens_by)

    def _opens_by(self, opener: host.Thread | None) -> None:
        running = [one for one in self._openers if one.is_alive()]
        self._openers, self._begun = running if opener is None else [*running, opener], opener is not None

    def _open_here(self, epoch: int) -> None:
        made: list[Communicator] = []
        try:
            made.append(communicator := self._make(epoch))
            with self.lock:
                wanted = epoch == self._epoch and not self._given_up
                if wanted:
                    self._install(communicator)
        except BaseException as error:  # the lane's operations get it, not this thread
            if made:
                self.retire(*made)
            if epoch == self._epoch:
                self._failed(error)
            return
        if wanted:
            self._made()
        else:
            self.retire(communicator)

    def opened(self) -> Communicator:
        """The communicator, for a caller that knows that it is open."""
        assert self.communicator is not None
        return self.communicator

    def _install(self, communicator: Communicator) -> None:
        """Have operations issued on ``communicator`` from now on."""
        if self._previous is not None and (inherit := getattr(communicator, "inherit", None)) is not None:
            inherit(self._previous)
        self.communicator = self._previous = communicator
        self._opened_once.settle()

    def replace(self, epoch: int, *, waits: bool) -> Communicator | None:
        """Open another communicator for ``epoch``. Returns the replaced one, which is to be retired."""
        replaced, self.communicator = self.communicator, None
        self._epoch = epoch
        self._open(waits=waits)
        return replaced

    def retire(self, communicator: Communicator) -> None:
        """Close a replaced communicator, at the latest in ``close``; its messages go on in the next one."""
        retire = getattr(communicator, "retire", None)
        if retire is None or not retire():
            self._retired.append(communicator)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the first communicator; returns whether it is open or given up."""
        return self._opened_once.wait(seconds)

    def give_up(self) -> None:
        """End all waits for a communicator that is being opened; it will be retired once it is open."""
        self._given_up = True
        self._opened_once.settle()

    def join(self) -> None:
        """Wait a bounded time for opening threads, lest the program ends while one is in native code."""
        until = host.monotonic() + _GIVE_UP_SECONDS
        for opener in self._openers:
            opener.join(max(0.0, until - host.monotonic()))

    def close(self, *, abort: bool) -> None:
        """Close all communicators. Abort all but the latest first, as they have half-matched calls.

        With ``abort``, abort the latest one as well.
        """
        self._given_up = True
        self.join()
        last = self.communicator or self._previous
        communicators = [*self._retired, *([last] if last else [])]
        self._retired, self.communicator, self._previous = [], None, None
        with ExitStack() as ends:  # all of them, whatever one raises; the last one that is added ends first
            for communicator in reversed(communicators):
                ends.callback(communicator.close)
                if abort or communicator is not communicators[-1]:
                    ends.callback(communicator.abort)

"""The communicator of a lane: opened on first use, and replaced after a refusal that left calls half-matched.

This module must not know what is issued on the communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from asynccoll import host
from asynccoll.host.helpers import start_once
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Promise

#: When the lane is closed: how long to wait for threads that are still opening a communicator.
_GIVE_UP_SECONDS = 5.0


class Connection:
    """A lane's communicators, one after another; each serves one or more epochs (``cut``).

    ``open``, ``replace`` and ``give_up`` are called with the lane's lock held; ``wait``, ``retire``, ``join``
    and ``close`` without it, because they may block for long. A helper thread that has opened a communicator
    takes the lock itself.
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

        A helper thread that runs ``make`` calls ``made`` or ``failed`` afterwards, without the lane's lock.
        """
        self.name = name
        self.lock: host.Lock = lock
        self.communicator: Communicator | None = None
        self._make = make
        self._made = made
        self._failed = failed
        self._epoch = 0
        self._opened_once = Promise()
        self._openers: list[host.Thread] = []  # the latest one, and earlier ones that may still be opening
        self._previous: Communicator | None = None  # the latest one; the next takes over its messages
        self._retired: list[Communicator] = []  # replaced, but not closed yet
        self._begun = self._given_up = False

    @property
    def has_opened(self) -> bool:
        """Whether the first communicator has been opened, or the lane has given up opening it."""
        return self._opened_once.done()

    def open(self, *, waits: bool) -> None:
        """Open the first communicator, once; on a helper thread if opening ``waits`` for other members."""
        if not self._begun:
            self._open(waits=waits)

    def _open(self, *, waits: bool) -> None:
        if not waits:
            communicator = self._make(self._epoch)
            self._begun = True  # only now: if ``_make`` raises, the next call tries again
            self._install(communicator)
            return
        start_once(f"asynccoll-open-{self.name}", partial(self._open_here, self._epoch), self._opens_by)

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
        except BaseException as error:  # raised in the lane's operations, not in this thread
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
        """Return the communicator; the caller knows that it is open."""
        assert self.communicator is not None
        return self.communicator

    def _install(self, communicator: Communicator) -> None:
        """Make ``communicator`` the one that operations are issued on from now on."""
        if self._previous is not None and (inherit := getattr(communicator, "inherit", None)) is not None:
            inherit(self._previous)
        self.communicator = self._previous = communicator
        self._opened_once.settle()

    def replace(self, epoch: int, *, waits: bool) -> Communicator | None:
        """Open another communicator for ``epoch``. Returns the old one, for the caller to retire."""
        replaced, self.communicator = self.communicator, None
        self._epoch = epoch
        self._open(waits=waits)
        return replaced

    def retire(self, communicator: Communicator) -> bool:
        """Close a replaced communicator, in ``close`` at the latest; the next one takes over its messages.

        Returns whether it is closed, which soon ends the collectives that were in flight on it.
        """
        retire = getattr(communicator, "retire", None)
        closed = retire is not None and retire()
        if not closed:
            self._retired.append(communicator)
        return closed

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the first communicator. Returns whether it is open or given up."""
        return self._opened_once.wait(seconds)

    def give_up(self) -> None:
        """End all waits for a communicator that is being opened; once open, it is retired."""
        self._given_up = True
        self._opened_once.settle()

    def join(self) -> None:
        """Wait a bounded time for opening threads, lest the program end while one is in native code."""
        until = host.monotonic() + _GIVE_UP_SECONDS
        for opener in self._openers:
            opener.join(max(0.0, until - host.monotonic()))

    def close(self, *, abort: bool, in_step: bool) -> None:
        """Close all communicators. First abort the retired ones, because they have half-matched calls.

        With ``abort``, abort the latest one as well. ``in_step``: every rank has made all calls on that one.
        """
        self._given_up = True
        self.join()
        last = self.communicator or self._previous
        retired = self._retired
        communicators = [*retired, *([last] if last is not None and last not in retired else [])]
        if not in_step and (half_matched := getattr(last, "half_matched", None)) is not None:
            half_matched()
        self._retired, self.communicator, self._previous = [], None, None
        with ExitStack() as ends:  # closes all of them even if one raises; the last one added is closed first
            for communicator in reversed(communicators):
                ends.callback(communicator.close)
                if abort or communicator in retired:
                    ends.callback(communicator.abort)

"""The communicator of a lane: opened on first use, and again after a refusal that left calls half matched.

What it must not know: what is issued on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.transport.completion import Promise

if TYPE_CHECKING:
    from asynccoll.transport.communicator import Communicator

__all__ = ["Connection"]

#: How long a thread that opens a lane which is given up may take to notice.
_GIVE_UP_SECONDS = 5.0


class Connection:
    """One communicator after another, each for one epoch and those after it, until another is needed.

    The lane holds its lock whenever it opens or replaces one, or gives up, and never when it waits, retires
    or closes, which a library may take its time over. What a helper thread has opened takes the lock itself.
    """

    def __init__(
        self,
        name: str,
        lock: host.Lock,
        make: Callable[[int], Communicator],
        made: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``make`` one for an epoch; where a helper thread does, the lane is told without its lock held."""
        self.name = name
        self.lock: host.Lock = lock
        self.communicator: Communicator | None = None
        self._make = make
        self._made = made
        self._failed = failed
        self._epoch = 0
        self._opened_once = Promise()
        self._opener: host.Thread | None = None
        self._previous: Communicator | None = None  # the messages of which the next one takes over
        self._retired: list[Communicator] = []
        self._begun = self._given_up = False

    @property
    def has_opened(self) -> bool:
        """Whether all members have come, or it is given up that they do."""
        return self._opened_once.done()

    def open(self, *, waits: bool) -> None:
        """Open the first, once; on a helper thread if that ``waits`` for the other members."""
        if not self._begun:
            self._open(waits=waits)

    def _open(self, *, waits: bool) -> None:
        self._begun = True
        if not waits:
            self._install(self._make(self._epoch))
            return
        opener = host.Thread(
            target=self._open_here, args=(self._epoch,), name=f"asynccoll-open-{self.name}", daemon=True
        )
        opener.start()
        self._opener = opener  # who closes joins it, which is not to be done before it has started

    def _open_here(self, epoch: int) -> None:
        try:
            communicator = self._make(epoch)
        except BaseException as error:  # the lane's, and no longer this thread's
            if epoch == self._epoch:
                self._failed(error)
            return
        with self.lock:
            wanted = epoch == self._epoch and not self._given_up
            if wanted:
                self._install(communicator)
        if wanted:
            self._made()
        else:
            self.retire(communicator)

    def opened(self) -> Communicator:
        """What one issues on, where it is known to be open."""
        assert self.communicator is not None
        return self.communicator

    def _install(self, communicator: Communicator) -> None:
        """Issue on this one from now on."""
        if self._previous is not None and (inherit := getattr(communicator, "inherit", None)) is not None:
            inherit(self._previous)
        self.communicator = self._previous = communicator
        self._opened_once.settle()

    def replace(self, epoch: int, *, waits: bool) -> Communicator | None:
        """Open another one; gives what it replaces, which is to be retired."""
        replaced, self.communicator = self.communicator, None
        self._epoch = epoch
        self._open(waits=waits)
        return replaced

    def retire(self, communicator: Communicator) -> None:
        """Close what is of no more use of it; its messages go on, in the one that comes after it."""
        retire = getattr(communicator, "retire", None)
        if retire is None or not retire():
            self._retired.append(communicator)

    def wait(self, seconds: float) -> bool:
        """Whether the first one is open, or given up, after at most ``seconds``."""
        return self._opened_once.wait(seconds)

    def give_up(self) -> None:
        """Let nobody wait for one that is being opened: it is wanted no more."""
        self._given_up = True
        self._opened_once.settle()

    def join(self) -> None:
        """Wait for the thread that opens one, or the program may end while it is in native code."""
        if self._opener is not None:
            self._opener.join(_GIVE_UP_SECONDS)

    def close(self, *, abort: bool) -> None:
        """Close them all. All but the last have half-matched calls on them, as all have with ``abort``."""
        self._given_up = True
        self.join()
        last = self.communicator or self._previous
        communicators = [*self._retired, *([last] if last else [])]
        self._retired, self.communicator, self._previous = [], None, None
        for communicator in communicators:
            if abort or communicator is not communicators[-1]:
                communicator.abort()
            communicator.close()

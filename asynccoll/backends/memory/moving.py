"""What moves calls through memory that ranks share, in whichever thread passes; and how its threads sleep.

The caller moves what can be moved when it issues, a waiter while it waits, the watcher when it is rung. They
take turns under a lock that is held for one step at a time. What a step is, is a subclass's (``engine``,
``pair``).

**Nobody sleeps through a word that was written.** Who is about to sleep says so in a word of its own, then
looks once more; who has written looks at that word afterwards. Between a store and a look at another word
stands a fence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol

from asynccoll.backends.api import Callback, host
from asynccoll.backends.memory.layout import ABORTED, ASLEEP, CLOSED, LEFT, STATE, WATCHING
from asynccoll.errors import CollectiveError, PeerLostError, collective_error

if TYPE_CHECKING:
    from asynccoll.backends.memory.flight import InFlight
    from asynccoll.backends.memory.region import Region

__all__ = ["Bells", "Mover"]

#: Looks in a row before the processor is offered to others, and turns given before sleeping: some 20 us, and
#: some 200. Where ranks share cores, the rank that is waited for needs this one.
_LOOKS, _TURNS = 20, 200
_LOOKS_WHERE_CROWDED, _TURNS_WHERE_CROWDED = 2, 4
_MOST_NAPS = 0xFFFFFFFF


class Bells(Protocol):
    """How the ranks of a region wake each other. Ranks are indices there."""

    #: more ranks than cores
    crowded: bool

    def sleep(self, said: int, seconds: float) -> None:
        """Until this rank is woken, or something else than ``said`` stands in its word, or time is up."""

    def wake(self, index: int) -> None:
        """Wake the sleeping threads of a rank."""

    def ring(self, index: int) -> None:
        """Have the watcher of a rank look at the region."""

    def watch(self, mover: Mover) -> None:
        """From now on this rank's watcher looks at the region when it is rung."""

    def later(self, job: Callable[[], object]) -> None:
        """Run ``job``, which may wait, on a thread of its own."""

    def gone(self) -> Sequence[int]:
        """The ranks of the region, as errors call them, whose processes have ended."""


class Mover(ABC):
    """The calls of one rank on one region."""

    def __init__(self, region: Region, bells: Bells, where: str, ranks: Sequence[int]) -> None:
        """``where`` and ``ranks``: what errors call the region, and its members."""
        self.region = region
        self._bells = bells
        self._where = where
        self._ranks = ranks
        self._words = region.words
        self._mine = region.mine
        self._lock = host.Lock()
        self._fence = host.Lock()
        self._sleepers = 0
        self._left = False
        self._naps = count(1)  # each has a number of its own
        self._watched = False
        self._listened: dict[InFlight, None] = {}  # calls that are not over and have callbacks
        self._attended_until = 0.0  # until then somebody waits in place, and moves what there is
        self._broken: CollectiveError | None = None
        self._untold: deque[InFlight] = deque()  # over, with callbacks
        self._looks = range(_LOOKS_WHERE_CROWDED if bells.crowded else _LOOKS)
        self._turns = _TURNS_WHERE_CROWDED if bells.crowded else _TURNS
        others = [rank for rank in range(region.size) if rank != region.index]
        self._bases = list(zip(others, region.others, strict=True))

    # What a step is

    @abstractmethod
    def _step(self) -> bool:
        """Move what can be moved in one turn, with the lock held; whether anything moved."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether a call of this rank is not over."""

    @abstractmethod
    def _goes_on_by_itself(self) -> bool:
        """Whether there is something to move that somebody listens to, or others wait for."""

    @abstractmethod
    def _drop(self, error: CollectiveError) -> None:
        """End all calls that are not over with ``error``."""

    # Moving

    def poke(self) -> None:
        """Move what can be moved, unless somebody is at it. Callbacks are left to the watcher."""
        try:
            self._move_on()
            if self._untold:
                self._bells.ring(self.region.index)
        except BaseException:
            self._leave_to_watcher()
            raise

    def _leave_to_watcher(self) -> None:
        """The moving thread was interrupted: what it has written is told, and the watcher goes on."""
        self._tell_others()
        self._watch()

    def _move(self) -> bool:
        """One step, with the lock held; whether anything moved."""
        try:
            return self._step()
        except Exception as error:  # no one knows whose call that was: a waiter, or the watcher, came by
            self._fail(error)
            return True

    def _move_on(self) -> bool:
        """One turn under the lock; whether anything moved."""
        if not self._lock.acquire(False):
            return False
        try:
            moved = self._move()
        finally:
            self._lock.release()
        if moved:
            self._tell_others()
        return moved

    def _look_again(self) -> bool:
        """Move what can be moved, now that this rank has said that it looks no more; whether anything moved.

        The holder of the lock may have looked before that was said: this waits for it.
        """
        self._fence.acquire()
        self._fence.release()
        with self._lock:
            moved = self._move()
        if moved:
            self._tell_others()
        return moved

    def _over(self, call: InFlight, error: BaseException | None) -> None:
        """A call has ended, which its waiters are told; with the lock held. May be said again."""
        if not call.finished:
            call.end(error)
        if call.callbacks is not None:
            self._untold.append(call)
            self._listened.pop(call, None)
        if self._sleepers:
            self._words[self._mine + ASLEEP] = 0
            self._bells.wake(self.region.index)

    # Waking, and being woken

    def _tell_others(self) -> None:
        """Wake who sleeps until something is written."""
        self._fence.acquire()
        self._fence.release()
        words = self._words
        for rank, base in self._bases:
            if words[base + ASLEEP]:
                words[base + ASLEEP] = 0
                self._bells.wake(rank)
            if words[base + WATCHING]:
                words[base + WATCHING] = 0
                self._bells.ring(rank)

    def wait(self, call: InFlight, seconds: float) -> bool:
        """Move until that call is over, or so many seconds have passed; whether it is over."""
        words = self._words
        if words[self._mine + WATCHING] and not self._listened:
            words[self._mine + WATCHING] = 0  # a waiter looks for itself
        try:
            for _ in self._looks:
                if self._move_on() and call.finished:
                    break
            else:
                self._wait(call, host.monotonic() + seconds)
            if self._untold:
                self.tell()
            if self._is_busy():
                self._watch_if_needed()
        except BaseException:
            self._leave_to_watcher()
            raise
        return call.finished

    def _watch_if_needed(self) -> None:
        if self._goes_on_by_itself():
            self._watch()

    def _wait(self, call: InFlight, deadline: float) -> None:
        self._attended_until = deadline
        try:
            self._wait_until(call, deadline)
        finally:
            self._attended_until = 0.0

    def _wait_until(self, call: InFlight, deadline: float) -> None:
        turns = self._turns
        while not call.finished:
            if self._move_on():
                turns = self._turns
                if self._untold:
                    self.tell()
                continue
            left = deadline - host.monotonic()
            if left <= 0:
                return
            if turns:
                turns -= 1
                host.give_way()
            else:
                self._sleep(call, left)

    def _sleep(self, call: InFlight, seconds: float) -> None:
        self._sleepers += 1
        try:
            # Each says something else: who is about to sleep is not kept from seeing that the word was
            # cleared.
            said = next(self._naps) % _MOST_NAPS + 1
            self._words[self._mine + ASLEEP] = said
            if not self._look_again() and not call.finished and not self._lost():
                self._bells.sleep(said, seconds)
        finally:
            self._sleepers -= 1

    def listen(self, call: InFlight, callback: Callback) -> None:
        """Call ``callback`` when that call is over: here if it is already, else on the watcher's thread."""
        with self._lock:  # or it may be over between the look and the appending
            over = call.finished
            if not over:
                if call.callbacks is None:
                    call.callbacks = []
                    self._listened[call] = None
                call.callbacks.append(callback)
        if over:
            callback()
        else:
            self._watch()

    def _be_known(self) -> None:
        """From now on the watcher looks at this region when it is rung, or when a process has ended."""
        self._bells.watch(self)
        self._watched = True

    def _has_more(self) -> bool:
        """Whether something was moved, after which there may be more to move here."""
        return self._look_again()

    def _watch(self) -> None:
        """Have the watcher look from now on, first of all at once if there is something to do."""
        words = self._words
        words[self._mine + WATCHING] = 1
        if (self._has_more() and self._goes_on_by_itself()) or self._untold or self._lost():
            words[self._mine + WATCHING] = 0
            self._bells.ring(self.region.index)

    def attend(self) -> None:
        """On the watcher's thread, which was rung: move what can be moved, and tell who listens."""
        while True:
            while not self._is_attended() and self._move_on():
                host.give_way()
            self.tell()
            self._lost()
            if self._is_attended() or not self._goes_on_by_itself():
                return  # who waits has the watcher look again, if that is needed
            self._words[self._mine + WATCHING] = 1
            if not (self._look_again() or self._untold):
                return

    def _is_attended(self) -> bool:
        """Whether somebody waits in place, and so moves what there is."""
        return host.monotonic() < self._attended_until

    def tell(self) -> None:
        """Call the callbacks of what is over, each once."""
        untold = self._untold
        while untold:
            try:
                call = untold.popleft()
            except IndexError:  # another thread has taken the last one
                return
            callbacks, call.callbacks = call.callbacks or [], None
            for callback in callbacks:
                callback()

    # Ends

    def _lost(self) -> bool:
        """End what waits for a rank that has gone; whether there was anything."""
        if not self._is_busy():
            return False
        gone = self._gone()
        if not gone:
            return False
        with self._lock:
            while self._move():
                pass
            if not self._is_busy():
                return True
            who = ", ".join(map(str, gone))
            self._end_all(PeerLostError(f"the shared memory of {self._where} was left by rank {who}"))
        self._tell_others()
        if self._untold:
            self._bells.ring(self.region.index)
        return True

    def _gone(self) -> list[int]:
        """The ranks, as errors call them, without which nothing goes on here."""
        words = self._words
        left = {self._ranks[rank] for rank, base in self._bases if words[base + STATE] in (CLOSED, ABORTED)}
        return sorted(left.union(self._bells.gone()))

    def _end_all(self, error: CollectiveError) -> None:
        self._broken = error
        self._drop(error)

    def _fail(self, error: Exception) -> None:
        """A step could not be done: all calls in flight end with that, and the other ranks lose this one."""
        self._words[self._mine + STATE] = ABORTED
        self._end_all(collective_error(error, f"moving data through the memory of {self._where}"))

    def stop(self, state: int, error: CollectiveError) -> None:
        """Leave: end what is in flight here, and soon on the others that wait for this rank. Once."""
        with self._lock:
            if self._left:
                return  # and the memory may be another lane's by now
            self._left = True
            self._words[self._mine + STATE] = state
            self._end_all(error)
        self._tell_others()
        if self._untold:
            self._bells.ring(self.region.index)
        self._words[self._mine + LEFT] = 1

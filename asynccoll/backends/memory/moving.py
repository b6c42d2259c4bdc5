"""Moving calls through memory that ranks share, in several threads, and how these threads sleep.

To move a call is to make the progress on it that is possible now: to write data where there is room, and to
read what others have written. A caller does so when it issues, a waiter while it waits, and the *watcher*,
one thread of the process for all regions, when it is rung. They take turns under a lock that is held for one
step at a time. Subclasses (``engine``, ``pair``) say what a step is; it moves any call of the region.

**No thread sleeps through data that was written.** A thread that is about to sleep writes that to a word of
its rank, then looks once more for something to move; a thread that has written data looks at the other ranks'
words afterwards. Between the store and the look there is a fence (taking and releasing a lock, which on x86
orders a store before later loads).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import Protocol

from asynccoll.backends.api import Callback, host, unseen
from asynccoll.backends.memory.flight import InFlight
from asynccoll.backends.memory.layout import ABORTED, ASLEEP, CLOSED, LEFT, STATE, WATCHING
from asynccoll.backends.memory.region import Region
from asynccoll.errors import CollectiveError, PeerLostError, collective_error

#: A waiter looks this often in a row (about 20 us), then gives way to other threads this often (about 200 us)
#: before it sleeps. Both are small if ranks share cores, since the rank that is waited for needs this core.
_LOOKS, _TURNS = 20, 200
_LOOKS_WHERE_CROWDED, _TURNS_WHERE_CROWDED = 2, 4
_MOST_NAPS = 0xFFFFFFFF


class Bells(Protocol):
    """How the ranks of a region wake each other. Ranks are indices in the region."""

    #: whether there are more ranks than cores
    crowded: bool

    def sleep(self, said: int, seconds: float) -> None:
        """Sleep until this rank is woken or time is up; return at once if its word is not ``said``."""

    def wake(self, index: int) -> None:
        """Wake the sleeping threads of a rank."""

    def ring(self, index: int) -> None:
        """Have the watcher of a rank look at the region."""

    def watch(self, mover: Mover) -> None:
        """Have this rank's watcher call ``mover.attend`` from now on, when it is rung."""

    def later(self, job: Callable[[], object]) -> None:
        """Run ``job``, which may wait, on another thread."""

    def gone(self) -> Sequence[int]:
        """Return the ranks of the region (numbered as in errors) whose processes have ended."""


class Mover(ABC):
    """The calls of one rank on one region, and the threads that move them."""

    def __init__(self, region: Region, bells: Bells, where: str, ranks: Sequence[int]) -> None:
        """``where`` and ``ranks`` are the region and its members, as errors name them."""
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
        self._naps = count(1)  # the number of each sleep
        self._watched = False  # whether the watcher knows this region
        self._listened: dict[InFlight, None] = {}  # calls that are not over and have callbacks
        self._attended_until = 0.0  # until then a waiter moves all calls, unless it ends before
        self._broken: CollectiveError | None = None  # the error of all further calls
        self._untold: list[Callback] = []  # callbacks, yet to be called, of calls that are over
        self._looks = range(_LOOKS_WHERE_CROWDED if bells.crowded else _LOOKS)
        self._turns = _TURNS_WHERE_CROWDED if bells.crowded else _TURNS
        others = [rank for rank in range(region.size) if rank != region.index]
        self._bases = list(zip(others, region.others, strict=True))

    # What a step is

    @abstractmethod
    def _step(self) -> bool:
        """Move what can be moved in one turn, with the lock held; return whether anything moved."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether a call of this rank is not over."""

    @abstractmethod
    def _goes_on_by_itself(self) -> bool:
        """Whether calls have to move without a waiter here: for a callback, or for other ranks."""

    @abstractmethod
    def _drop(self, error: CollectiveError) -> None:
        """End all calls that are not over with ``error``."""

    # Moving

    @unseen
    def poke(self) -> None:
        """Move what can be moved, unless another thread is moving. The watcher calls the callbacks.

        A thread that only polls never sleeps, so this also checks whether the other ranks are still there. It
        may be called in a finalizer, which garbage collection runs in any thread, also within a step.
        """
        if self._lock.locked():
            return
        try:
            if not self._move_on():
                self._lost()
            if self._untold:
                self._bells.ring(self.region.index)
        except BaseException:
            self._leave_to_watcher()
            raise

    def _leave_to_watcher(self) -> None:
        """Announce what an interrupted thread has written, and have the watcher go on in its place.

        The interrupt may have come after a rank's word was cleared, and before the rank was woken.
        """
        self._tell_others(whatever_they_said=True)
        self._watch()

    def _move(self) -> bool:
        """Do one step, with the lock held; return whether anything moved."""
        try:
            if self._broken is None:
                return self._step()
            if busy := self._is_busy():  # an interrupt came while calls were being ended
                self._drop(self._broken)
            return busy
        except Exception as error:  # this thread may not be the waiter of the call that failed: do not raise
            self._fail(error)
            return True

    def _move_on(self) -> bool:
        """Take the lock, unless another thread has it, and do one step; return whether anything moved."""
        if self._lock.locked():
            return False
        # Not acquire(False): Ctrl-C as that returns would leave the lock held. So this may wait for a step.
        with self._lock:
            moved = self._move()
        if moved:
            self._tell_others()
        return moved

    def _look_again(self) -> bool:
        """Do one more step, after this rank has written that it will sleep; return whether anything moved.

        This waits for the lock: its holder may have looked before that was written.
        """
        with self._fence:
            pass
        with self._lock:
            moved = self._move()
        if moved:
            self._tell_others()
        return moved

    def _over(self, call: InFlight, error: BaseException | None) -> None:
        """End ``call`` and wake its waiters, with the lock held. May be repeated after an interrupt."""
        if not call.finished:
            call.end(error)
        if (callbacks := call.callbacks) is not None:
            # Within one call of C, so that an interrupt neither loses a callback nor has it called twice.
            self._untold.extend(map(callbacks.pop, repeat(0, len(callbacks))))
            self._listened.pop(call, None)
        if self._sleepers:
            self._words[self._mine + ASLEEP] = 0
            self._bells.wake(self.region.index)

    # Waking, and being woken

    def _tell_others(self, *, whatever_they_said: bool = False) -> None:
        """Wake the sleeping threads and the watchers of the other ranks."""
        with self._fence:
            pass
        words = self._words
        for rank, base in self._bases:
            if words[base + ASLEEP] or whatever_they_said:
                words[base + ASLEEP] = 0
                self._bells.wake(rank)
            if words[base + WATCHING] or whatever_they_said:
                words[base + WATCHING] = 0
                self._bells.ring(rank)

    @unseen
    def wait(self, call: InFlight, seconds: float) -> bool:
        """Move calls until ``call`` is over or ``seconds`` have passed; return whether it is over."""
        words = self._words
        try:
            if words[self._mine + WATCHING] and not self._listened:
                words[self._mine + WATCHING] = 0  # this thread looks itself: the watcher need not be rung
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
        try:
            self._attended_until = deadline
            self._wait_until(call, deadline)
        finally:
            self._attended_until = 0.0

    def _wait_until(self, call: InFlight, deadline: float) -> None:
        turns = self._turns
        while not call.finished:
            moved = self._move_on()
            if self._untold:  # of other calls, which any look may have ended
                self.tell()
            left = deadline - host.monotonic()
            if left <= 0:  # also while another, long call moves on and on
                return
            if moved:
                turns = self._turns
            elif turns:
                turns -= 1
                host.give_way()
            else:
                self._sleep(call, left)

    def _sleep(self, call: InFlight, seconds: float) -> None:
        self._sleepers += 1
        try:
            # Each sleep has a different number. So if the word is cleared before this thread sleeps, it does
            # not sleep, even if another thread has written its own number there since.
            said = next(self._naps) % _MOST_NAPS + 1
            self._words[self._mine + ASLEEP] = said
            if not self._look_again() and not call.finished and not self._lost():
                self._bells.sleep(said, seconds)
        finally:
            self._sleepers -= 1

    @unseen
    def listen(self, call: InFlight, callback: Callback) -> None:
        """Call ``callback`` when ``call`` is over: now if it is, else in a waiter or the watcher."""
        try:
            with self._lock:  # else the call may end between the check and the append
                over = call.finished
                if not over:
                    if call.callbacks is None:
                        call.callbacks = []
                    self._listened[call] = None
                    call.callbacks.append(callback)
            if not over:
                self._watch()
        except BaseException:
            self._leave_to_watcher()
            raise
        if over:
            callback()

    def _be_known(self) -> None:
        """Have the watcher look at this region from now on, when it is rung or a process has ended."""
        self._bells.watch(self)
        self._watched = True

    def _has_more(self) -> bool:
        """Move what can be moved, and return whether there may be more to move here."""
        return self._look_again()

    def _watch(self) -> None:
        """Have other ranks ring this rank's watcher; ring it now if there is already something to do."""
        words = self._words
        words[self._mine + WATCHING] = 1
        if (self._has_more() and self._goes_on_by_itself()) or self._untold or self._lost():
            words[self._mine + WATCHING] = 0
            self._bells.ring(self.region.index)

    def attend(self) -> None:
        """Move what can be moved, and call callbacks. Runs on the watcher's thread when it was rung."""
        while True:
            while not self._is_attended() and self._move_on():
                self.tell()  # of calls that are over, while a long one moves on and on
                host.give_way()
            self.tell()
            self._lost()
            if self._is_attended() or not self._goes_on_by_itself():
                return  # a waiter has the watcher rung again if that is needed (``_watch_if_needed``)
            self._words[self._mine + WATCHING] = 1
            if not (self._look_again() or self._untold or self._lost()):
                return

    def _is_attended(self) -> bool:
        """Whether a thread waits here, and so moves all calls."""
        return host.monotonic() < self._attended_until

    def tell(self) -> None:
        """Call the callbacks of calls that are over, each once. After an interrupt the rest are still due."""
        host.call_off(self._untold)

    # Ends

    def _lost(self) -> bool:
        """If a rank has gone, do what can still be done, and end all other calls with an error.

        Returns whether a rank has gone and there were calls that were not over.
        """
        if not self._is_busy():
            return False
        gone = self._gone()
        if not gone:
            return False
        with self._lock:
            while self._move():
                pass
            if self._is_busy():
                who = ", ".join(map(str, gone))
                self._end_all(PeerLostError(f"rank {who} has left the shared memory of {self._where}"))
        self._tell_others()
        if self._untold:
            self._bells.ring(self.region.index)
        return True

    def _gone(self) -> list[int]:
        """Return the ranks (numbered as in errors) that have left the region, or whose processes ended."""
        words = self._words
        left = {self._ranks[rank] for rank, base in self._bases if words[base + STATE] in (CLOSED, ABORTED)}
        return sorted(left.union(self._bells.gone()))

    def _end_all(self, error: CollectiveError) -> None:
        self._broken = error
        self._drop(error)

    def _fail(self, error: Exception) -> None:
        """End all calls after a step that failed with ``error``; to the other ranks, this one has left."""
        self._words[self._mine + STATE] = ABORTED
        self._end_all(collective_error(error, f"moving data through the memory of {self._where}"))

    def stop(self, state: int, error: CollectiveError) -> None:
        """Leave the region, once: end the calls in flight here, and soon those that wait for this rank."""
        try:
            self._leave(state, error)
        except BaseException:  # an interrupt: the other ranks still wait for this one
            self._leave(state, error)
            raise

    def _leave(self, state: int, error: CollectiveError) -> None:
        with self._lock:
            if self._left:
                return  # and must not write: the memory may be another lane's by now
            self._words[self._mine + STATE] = state
            self._end_all(error)
        self._tell_others()
        if self._untold:
            self._bells.ring(self.region.index)
        # Last, since the memory may be lent to another lane once all ranks have written this.
        with self._lock:
            if not self._left:
                self._words[self._mine + LEFT] = 1
                self._left = True

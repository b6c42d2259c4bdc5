"""What carries the calls of one lane through shared memory, on one of its ranks.

Every thread that passes moves what can be moved: the caller when it issues, a waiter, the watcher. They
take turns under a lock that is held for one step at a time. A rank posts a step once all have read what was
in that slot before; it takes a step once all have posted it. So nobody ever waits for a rank that is ahead,
and what nobody awaits is posted all the same.

**What makes it sound.** Every word has one writer, and says what has been done, never what will be; data is
written before the word that tells of it, which x86 keeps in order. A step is committed by one store, of a
word or of an attribute, and whatever is done before that store can be done once more: an interrupt (Ctrl-C)
may strike anywhere. Steps after a call's first are posted only once all ranks are known to have made that
call; so ranks that differ about a call have used one step for it, all of them, and go on with the next.

**Nobody sleeps through a word that was written.** Who is about to sleep says so in a word of its own, then
looks once more; who has written looks at that word afterwards. Between a store and a look at another word
stands a fence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol

from asynccoll.backends.api import Callback, host, mismatch
from asynccoll.backends.memory.layout import (
    ABORTED,
    ASLEEP,
    CLOSED,
    COMBINED,
    LEFT,
    LENGTHS,
    PLACES,
    POSTED,
    READ,
    SLOTS,
    STATE,
    WATCHING,
)
from asynccoll.backends.memory.region import Region
from asynccoll.errors import CollectiveError, PeerLostError, collective_error

if TYPE_CHECKING:
    from asynccoll.backends.memory.exchange import Exchange

__all__ = ["Bells", "Engine"]

#: How far a rank puts data into slots before the others' has been taken: further, it leaves the cache.
_AHEAD = 3
#: Looks in a row before the processor is offered to others, and turns given before sleeping: some 20 us, and
#: some 200. Where ranks share cores, the rank that is waited for needs this one.
_LOOKS, _TURNS = 20, 200
_LOOKS_WHERE_CROWDED, _TURNS_WHERE_CROWDED = 2, 4
_STEP_BITS = 0xFFFFFFFF


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

    def watch(self, engine: Engine) -> None:
        """From now on this rank's watcher looks at the region when it is rung."""

    def later(self, job: Callable[[], object]) -> None:
        """Run ``job``, which may wait, on a thread of its own."""

    def gone(self) -> Sequence[int]:
        """The ranks whose processes have ended."""


class Engine:
    """The calls of one rank on one region, in the order in which they were made."""

    def __init__(self, region: Region, bells: Bells, where: str, ranks: Sequence[int]) -> None:
        """``where`` and ``ranks``: what errors call the lane, and its members."""
        self.region = region
        self._bells = bells
        self._where = where
        self._ranks = ranks
        self._words = region.words
        self._mine = region.mine
        self._lock = host.Lock()
        self._fence = host.Lock()
        self._queue: deque[Exchange] = deque()  # not over
        self._entering: deque[Exchange] = deque()  # those of which not all steps are posted
        self._posted = 0  # the latest step
        self._room = SLOTS  # up to here every slot was seen to be free
        self._sleepers = 0
        self._halted = False
        self._left = False
        self._naps = count(1)  # each has a number of its own
        self._watched = False
        self._listened: dict[Exchange, None] = {}  # calls that are not over and have callbacks
        self._combining: dict[Exchange, None] = {}  # calls that are not over, of which each reduces a part
        self._attended_until = 0.0  # until then somebody waits in place, and moves what there is
        self._broken: CollectiveError | None = None
        self._untold: deque[Exchange] = deque()  # over, with callbacks
        self._looks = range(_LOOKS_WHERE_CROWDED if bells.crowded else _LOOKS)
        self._turns = _TURNS_WHERE_CROWDED if bells.crowded else _TURNS
        others = [rank for rank in range(region.size) if rank != region.index]
        self._bases = list(zip(others, region.others, strict=True))

    # Issuing

    def start(self, exchange: Exchange) -> Exchange:
        """Accept a call after those before; post what can be posted of it."""
        if not self._watched:  # others may ring for this lane from now on
            self._be_known()
        try:
            with self._lock:
                if self._broken is not None:
                    exchange.end(self._broken)
                    return exchange
                # Within one call of C, so that an interrupt leaves it in both or in none.
                any(map(deque.append, (self._queue, self._entering), (exchange, exchange)))
                if exchange.combines:
                    self._combining[exchange] = None
                try:
                    posted = self._post()
                except Exception as error:
                    self._fail(error)
                    posted = True
            if posted:
                self._tell_others()
            if self._entering or self._combining or self._listened:  # and nobody may come by
                self._watch_if_needed()
        except BaseException:
            self._leave_to_watcher()
            raise
        return exchange

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

    def _move(self) -> bool:
        """Take a step of the oldest call, and post what there is room for; whether anything moved."""
        if self._halted or not self._queue:
            return False
        try:
            taken = self._take(self._queue[0])
            return (bool(self._entering) and self._post()) or taken
        except Exception as error:  # no one knows whose call that was: a waiter, or the watcher, came by
            self._fail(error)
            return True

    def _post(self) -> bool:
        """Post steps, in order, as far as there is room; whether there were any."""
        entering, words = self._entering, self._words
        before = self._posted
        while entering and not self._halted:
            exchange = entering[0]
            step = self._posted + 1
            done = step - exchange.first if exchange.first else 0
            if done:
                if not (
                    exchange.verified or exchange.finished or self._verify(exchange) or exchange.finished
                ):
                    break
                if exchange.finished or done == exchange.steps:
                    entering.popleft()
                    continue
                if step - words[self._mine + READ] > _AHEAD:
                    break
            if step > self._room and not self._has_room(step):
                break
            slot = step % SLOTS
            if not done:
                if exchange.has_length:
                    words[self._mine + LENGTHS + slot] = exchange.length()
                words[self._mine + PLACES + slot] = exchange.place << 1 | (exchange.disagreed is not None)
                self.region.write_text(slot, exchange.text)
                exchange.put(0, slot)
                exchange.first = step
            else:
                exchange.put(done, slot)
            words[self._mine + POSTED + slot] = (step & _STEP_BITS) << 32 | exchange.checksum
            self._posted = step
            if exchange.steps == 1:
                entering.popleft()
        return self._posted != before

    def _has_room(self, step: int) -> bool:
        """Whether everybody has read what is in the slot of ``step``."""
        words = self._words
        read = min(words[self._mine + READ], *(words[base + READ] for base in self.region.others))
        self._room = read + SLOTS
        return step <= self._room

    def _all_posted(self, step: int, checksum: int) -> bool:
        """Whether all ranks have posted ``step`` of the same call."""
        place, said = POSTED + step % SLOTS, (step & _STEP_BITS) << 32 | checksum
        words = self._words
        return all(words[base + place] == said for base in self.region.others)

    def _verify(self, exchange: Exchange) -> bool:
        """Whether all ranks are known to have made this call; if they have made others, it ends."""
        step, words = exchange.first, self._words
        place, said = POSTED + step % SLOTS, (step & _STEP_BITS) << 32 | exchange.checksum
        for base in self.region.others:
            if (one := words[base + place]) != said:
                if one >> 32 != step & _STEP_BITS:
                    return False  # that one has not come: so it is nearly always
                break
        else:
            return self._agree(exchange)
        # Each is read once: between two looks a rank may have posted what is expected.
        found = [words[base + place] for base in self.region.others]
        if any(one >> 32 != step & _STEP_BITS for one in found):
            return False  # somebody has not come
        if all(one == said for one in found):
            return self._agree(exchange)
        places = [words[base + PLACES + step % SLOTS] for base in (self._mine, *self.region.others)]
        if all(place >> 1 == exchange.place for place in places):
            self._disagree(exchange, shared=any(place & 1 for place in places))
        # Else a rank is still at the parts of an earlier call, about which ranks differ: it has its lane
        # begin a new epoch, in which this call is made once more, or lost.
        return False

    def _agree(self, exchange: Exchange) -> bool:
        step, words = exchange.first, self._words
        if exchange.has_length:
            place = LENGTHS + step % SLOTS
            lengths = [words[base + place] for base in self.region.others]
            lengths.insert(self.region.index, words[self._mine + place])
            try:
                exchange.agreed(lengths, step % SLOTS)
                exchange.is_long = exchange.steps != 1
            except CollectiveError as error:  # the same on every rank
                if self._queue[0] is exchange:  # else it is found again once those before are over
                    self._end(exchange, error)
                return False
            self._rouse_short(exchange, lengths)
        exchange.verified = True
        return True

    def _rouse_short(self, exchange: Exchange, lengths: Sequence[int]) -> None:
        """Have those take part in the later steps of a call to whom it was one of a single step."""
        if exchange.steps == 1:
            return
        for index, length in enumerate(lengths):
            if length == 1 and index != self.region.index:
                self._bells.ring(index)

    def _disagree(self, exchange: Exchange, *, shared: bool) -> None:
        """Ranks differ about this call; where it is ``shared``, a part of one, about how many steps it takes.

        Then nothing moves on here any more: who shares it has the lane begin a new epoch, elsewhere. Of a
        call behind others this is found again once those are over.
        """
        if self._queue[0] is not exchange:
            return
        self._halted = shared
        slot = exchange.first % SLOTS
        texts = [self.region.text(rank, slot) for rank in range(self.region.size)]
        error = mismatch(self._where, self._ranks, texts)
        if exchange.disagreed is not None:
            self._bells.later(partial(exchange.disagreed, error))
        self._end(exchange, error)

    def _take(self, exchange: Exchange) -> bool:
        """Combine and take a step of the oldest call; whether there was one."""
        words, mine = self._words, self._mine
        first, combines = exchange.first, exchange.combines
        if not first:
            return False
        if exchange.finished:  # an interrupt came before it had left the queue
            self._end(exchange, exchange.error())
            return True
        if not exchange.verified and not self._verify(exchange):
            return exchange.finished
        combined = combines and self._combine(exchange)
        step = words[mine + READ] + 1
        if step - first != exchange.steps:  # else an interrupt came after the last one
            if step > self._posted or not (
                self._is_combined(exchange, step)
                if combines
                else step == first or self._all_posted(step, exchange.checksum)
            ):
                return combined
            exchange.take(step - first, step % SLOTS)
            words[mine + READ] = step
            step += 1
        if step - first == exchange.steps:
            self._end(exchange, None)
        return True

    def _is_combined(self, exchange: Exchange, step: int) -> bool:
        """Whether all ranks have reduced their part of that step."""
        place, words = COMBINED + step % SLOTS, self._words
        return exchange.first + exchange.combined > step and all(
            words[base + place] == step for base in self.region.others
        )

    def _combine(self, exchange: Exchange) -> bool:
        step = exchange.first + exchange.combined
        if step > self._posted or exchange.combined == exchange.steps:
            return False
        if exchange.combined and not self._all_posted(step, exchange.checksum):
            return False
        exchange.combine(exchange.combined, step % SLOTS)
        self._words[self._mine + COMBINED + step % SLOTS] = step
        exchange.combined += 1
        return True

    def _end(self, exchange: Exchange, error: BaseException | None) -> None:
        """The oldest call is over."""
        if not exchange.finished:
            exchange.end(error)
        if exchange.first and not exchange.verified:
            self._words[self._mine + READ] = exchange.first
        if exchange.callbacks is not None:
            self._untold.append(exchange)
            self._listened.pop(exchange, None)
        if self._combining:
            self._combining.pop(exchange, None)
        if self._sleepers:
            self._words[self._mine + ASLEEP] = 0
            self._bells.wake(self.region.index)
        self._queue.popleft()

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

    def wait(self, exchange: Exchange, seconds: float) -> bool:
        """Move until that call is over, or so many seconds have passed; whether it is over."""
        words = self._words
        if words[self._mine + WATCHING] and not self._listened:
            words[self._mine + WATCHING] = 0  # a waiter looks for itself
        try:
            for _ in self._looks:
                if self._move_on() and exchange.finished:
                    break
            else:
                self._wait(exchange, host.monotonic() + seconds)
            if self._untold:
                self.tell()
            if self._queue:
                self._watch_if_needed()
        except BaseException:
            self._leave_to_watcher()
            raise
        return exchange.finished

    def _goes_on_by_itself(self) -> bool:
        """Whether there is something to move that somebody listens to, or others wait for.

        What has been posted whole moves nobody but who waits for it: all ranks do their part when they issue.
        """
        if self._listened or self._combining:
            return True
        return any(exchange.is_long or not exchange.first for exchange in tuple(self._entering))

    def _watch_if_needed(self) -> None:
        if self._goes_on_by_itself():
            self._watch()

    def _wait(self, exchange: Exchange, deadline: float) -> None:
        self._attended_until = deadline
        try:
            self._wait_until(exchange, deadline)
        finally:
            self._attended_until = 0.0

    def _wait_until(self, exchange: Exchange, deadline: float) -> None:
        turns = self._turns
        while not exchange.finished:
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
                self._sleep(exchange, left)

    def _sleep(self, exchange: Exchange, seconds: float) -> None:
        self._sleepers += 1
        try:
            # Each says something else: who is about to sleep is not kept from seeing that the word was
            # cleared.
            said = next(self._naps) % _STEP_BITS + 1
            self._words[self._mine + ASLEEP] = said
            if not self._look_again() and not exchange.finished and not self._lost():
                self._bells.sleep(said, seconds)
        finally:
            self._sleepers -= 1

    def listen(self, exchange: Exchange, callback: Callback) -> None:
        """Call ``callback`` when that call is over: here if it is already, else on the watcher's thread."""
        with self._lock:  # or it may be over between the look and the appending
            over = exchange.finished
            if not over:
                if exchange.callbacks is None:
                    exchange.callbacks = []
                    self._listened[exchange] = None
                exchange.callbacks.append(callback)
        if over:
            callback()
        else:
            self._watch()

    def _be_known(self) -> None:
        """From now on the watcher looks at this lane when it is rung, or when a process has ended."""
        self._bells.watch(self)
        self._watched = True

    def _watch(self) -> None:
        """Have the watcher look from now on, first of all at once if there is something to do.

        Not where a step was posted here for others alone: its waiter takes it, and rings.
        """
        words = self._words
        words[self._mine + WATCHING] = 1
        posted = self._posted
        more = self._look_again() and (posted == self._posted or bool(self._listened))
        if (more and self._goes_on_by_itself()) or self._untold or self._lost():
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
                exchange = untold.popleft()
            except IndexError:  # another thread has taken the last one
                return
            callbacks, exchange.callbacks = exchange.callbacks or [], None
            for callback in callbacks:
                callback()

    # Ends

    def _lost(self) -> bool:
        """End what waits for a rank that has gone; whether there was anything."""
        if not self._queue:
            return False
        gone = self._gone()
        if not gone:
            return False
        with self._lock:
            while self._move():
                pass
            if not self._queue:
                return True
            who = ", ".join(str(self._ranks[rank]) for rank in gone)
            lost = PeerLostError(f"the shared memory of {self._where} was left by rank {who}")
            self._end_all(lost)
        self._tell_others()
        if self._untold:
            self._bells.ring(self.region.index)
        return True

    def _gone(self) -> list[int]:
        """The ranks that will write nothing more."""
        words = self._words
        gone = {rank for rank, base in self._bases if words[base + STATE] in (CLOSED, ABORTED)}
        return sorted(gone | (set(self._bells.gone()) - {self.region.index}))

    def _end_all(self, error: CollectiveError) -> None:
        self._broken = error
        queue = self._queue
        self._entering.clear()
        while queue:
            self._end(queue[0], error)

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

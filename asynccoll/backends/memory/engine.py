"""What carries the calls of one lane through shared memory, on one of its ranks.

A rank posts a step once all have read what was in that slot before; it takes a step once all have posted it.
So nobody ever waits for a rank that is ahead, and what nobody awaits is posted all the same. Which threads do
so, and how they wake each other, is ``moving``'s.

**What makes it sound.** Every word has one writer, and says what has been done, never what will be; data is
written before the word that tells of it, which x86 keeps in order. A step is committed by one store, of a
word or of an attribute, and whatever is done before that store can be done once more: an interrupt (Ctrl-C)
may strike anywhere. Steps after a call's first are posted only once all ranks are known to have made that
call; so ranks that differ about a call have used one step for it, all of them, and go on with the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from asynccoll.backends.api import mismatch
from asynccoll.backends.memory.layout import COMBINED, LENGTHS, PLACES, POSTED, READ, SLOTS, STATE
from asynccoll.backends.memory.moving import Bells, Mover
from asynccoll.errors import CollectiveError

if TYPE_CHECKING:
    from asynccoll.backends.memory.exchange import Exchange
    from asynccoll.backends.memory.region import Region

__all__ = ["Engine"]

#: How far a rank puts data into slots before the others' has been taken: further, it leaves the cache.
_AHEAD = 3
_STEP_BITS = 0xFFFFFFFF


class Engine(Mover):
    """The calls of one rank on one region, in the order in which they were made."""

    def __init__(self, region: Region, bells: Bells, where: str, ranks: Sequence[int]) -> None:
        """``where`` and ``ranks``: what errors call the lane, and its members."""
        super().__init__(region, bells, where, ranks)
        self._queue: deque[Exchange] = deque()  # not over
        self._entering: deque[Exchange] = deque()  # those of which not all steps are posted
        self._posted = 0  # the latest step
        self._room = SLOTS  # up to here every slot was seen to be free
        self._halted = False
        self._combining: dict[Exchange, None] = {}  # calls that are not over, of which each reduces a part

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

    def _step(self) -> bool:
        """Take a step of the oldest call, and post what there is room for; whether anything moved."""
        if self._halted or not self._queue:
            return False
        taken = self._take(self._queue[0])
        return (bool(self._entering) and self._post()) or taken

    def died(self) -> list[int]:
        """The ranks that have ended without leaving the lane."""
        gone = self._bells.gone()
        if not gone or self._left:
            return []
        words = self._words
        return [
            self._ranks[rank]
            for rank, base in self._bases
            if self._ranks[rank] in gone and not words[base + STATE]
        ]

    def _is_busy(self) -> bool:
        return bool(self._queue)

    def _goes_on_by_itself(self) -> bool:
        """Whether there is something to move that somebody listens to, or others wait for.

        What has been posted whole moves nobody but who waits for it: all ranks do their part when they issue.
        """
        if self._listened or self._combining:
            return True
        return any(exchange.is_long or not exchange.first for exchange in tuple(self._entering))

    def _has_more(self) -> bool:
        """Not where a step was posted here for others alone: its waiter takes it, and rings."""
        posted = self._posted
        return self._look_again() and (posted == self._posted or bool(self._listened))

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
                words[self._mine + PLACES + slot] = exchange.place << 1 | exchange.shares
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
        if all(place >> 1 >= exchange.place for place in places):
            others = any(place >> 1 != exchange.place for place in places)
            self._disagree(exchange, shared=others or any(place & 1 for place in places))
        # Else a rank is still at the parts of an earlier call, about which ranks differ, or has more of them:
        # it has its lane begin a new epoch, in which this call is made once more, or lost.
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

        Then nothing moves on here any more: each rank has the lane begin a new epoch, elsewhere. Of a
        call behind others this is found again once those are over.
        """
        if self._queue[0] is not exchange:
            return
        self._halted = shared
        slot = exchange.first % SLOTS
        texts = [self.region.text(rank, slot) for rank in range(self.region.size)]
        error = mismatch(self._where, self._ranks, texts)
        if shared:
            self._bells.later(partial(self._end_halted, exchange, error))
        else:
            self._end(exchange, error)

    def _end_halted(self, exchange: Exchange, error: CollectiveError) -> None:
        """Tell who waits only once the lane is halted: else the next call would be made here, and be lost."""
        try:
            exchange.disagreed(exchange.place, error)
        finally:
            with self._lock:
                if self._queue and self._queue[0] is exchange:
                    self._end(exchange, error)
            self.tell()

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
        self._over(exchange, error)
        if exchange.first and not exchange.verified:
            self._words[self._mine + READ] = exchange.first
        if self._combining:
            self._combining.pop(exchange, None)
        self._queue.popleft()

    def _drop(self, error: CollectiveError) -> None:
        queue = self._queue
        self._entering.clear()
        while queue:
            self._end(queue[0], error)

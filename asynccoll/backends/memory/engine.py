"""The engine that carries the calls of one lane through shared memory, on one of its ranks.

A *step* is one use of a slot (``layout``); a call takes one or more. A rank *posts* a step: it puts its data
into its slot, once all ranks have read what was there before. It *takes* a step: it reads the slots of the
others, once all have posted it. So no rank waits for one that is ahead of it, and a call is posted even if no
thread awaits it. Which threads do this, and how they wake each other, is in ``moving``.

**Why this is safe.** Every word has one writer, and says what has been done, never what will be. Data is
written before the word that announces it, and x86 keeps that order. A step is committed by one store, to a
word or an attribute, and everything before that store can be done again, since an interrupt (Ctrl-C) may come
anywhere. Steps after a call's first are posted only once all ranks are known to have made that call. So if
ranks differ about a call, each has used one step for it, and they go on with the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from asynccoll.backends.api import misfit, mismatch
from asynccoll.backends.memory.exchange import Exchange
from asynccoll.backends.memory.layout import COMBINED, LENGTHS, PLACES, POSTED, READ, SLOTS, STATE
from asynccoll.backends.memory.moving import Bells, Mover
from asynccoll.backends.memory.region import Region
from asynccoll.errors import CollectiveError, CollectiveMismatchError

#: How many steps a rank posts beyond the last that it has taken: with more, data leaves the cache too soon.
_AHEAD = 3
_STEP_BITS = 0xFFFFFFFF


class Engine(Mover):
    """The calls of one rank on one region, carried out in the order in which they were made."""

    def __init__(self, region: Region, bells: Bells, where: str, ranks: Sequence[int]) -> None:
        """``where`` and ``ranks`` are the lane and its members, as errors name them."""
        super().__init__(region, bells, where, ranks)
        self._queue: deque[Exchange] = deque()  # the calls that are not over
        self._entering: deque[Exchange] = deque()  # those with steps that are yet to be posted
        self._posted = 0  # the last step that this rank has posted
        self._room = SLOTS  # up to this step, slots were seen to be free
        self._halted = False  # ranks differ about a part of a call: nothing moves here any more
        self._combining: dict[Exchange, None] = {}  # calls not over of which each rank reduces a part

    # Issuing

    def start(self, exchange: Exchange) -> Exchange:
        """Queue a call behind earlier ones, and post what can be posted of it."""
        if not self._watched:  # from now on other ranks may ring this rank's watcher for the lane
            self._be_known()
        try:
            with self._lock:
                if self._broken is not None:
                    exchange.end(self._broken)
                    return exchange
                # Within one call of C, so that an interrupt leaves the exchange in both queues or in none.
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
            if self._untold:  # a call that could not be posted has ended the others
                self._bells.ring(self.region.index)
            if self._entering or self._combining or self._listened:  # which may have to move without a waiter
                self._watch_if_needed()
        except BaseException:
            self._leave_to_watcher()
            raise
        return exchange

    # Moving

    def _step(self) -> bool:
        """Take a step of the oldest call, and post what there is room for; return whether anything moved."""
        if self._halted or not self._queue:
            return False
        taken = self._take(self._queue[0])
        return (bool(self._entering) and self._post()) or taken

    def died(self) -> list[int]:
        """Return the ranks whose processes ended without leaving the lane; none once this rank has left."""
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
        """Whether calls have to move without a waiter here: for a callback, or because other ranks need it.

        A call whose steps are all posted does not, unless each rank reduces a part of it: the other ranks
        have all of its data, and this rank's waiter takes theirs.
        """
        if self._listened or self._combining:
            return True
        return any(exchange.is_long or not exchange.first for exchange in tuple(self._entering))

    def _has_more(self) -> bool:
        """Move what can be moved, and return whether there may be more to move.

        False if this posted a step and no callback listens: that step is for the other ranks' waiters, which
        ring this rank when they have taken it.
        """
        posted = self._posted
        return self._look_again() and (posted == self._posted or bool(self._listened))

    def _post(self) -> bool:
        """Post steps, in order, as far as there is room; return whether any was posted."""
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
        """Whether all ranks have read what the slot of ``step`` held before."""
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
        """Compare the call with those of the other ranks; return whether all are known to have made it.

        If ranks have made different calls, the call ends with an error. If not all have made theirs yet,
        nothing happens.
        """
        step, words = exchange.first, self._words
        place, said = POSTED + step % SLOTS, (step & _STEP_BITS) << 32 | exchange.checksum
        for base in self.region.others:
            if (one := words[base + place]) != said:
                if one >> 32 != step & _STEP_BITS:
                    return False  # that rank has not made its call yet: nearly always the reason
                break
        else:
            return self._agree(exchange)
        # From here on each word is read once only: between two reads a rank may post the expected step.
        found = [words[base + place] for base in self.region.others]
        if any(one >> 32 != step & _STEP_BITS for one in found):
            return False  # a rank has not made its call yet
        if all(one == said for one in found):
            return self._agree(exchange)
        places = [words[base + PLACES + step % SLOTS] for base in (self._mine, *self.region.others)]
        if all(place >> 1 >= exchange.place for place in places):
            others = any(place >> 1 != exchange.place for place in places)
            self._disagree(exchange, shared=others or any(place & 1 for place in places))
        # Otherwise a rank is still at the parts of an earlier call, about which ranks differ, or has more of
        # them. That rank has the lane begin a new epoch, in which this call is made again, or is lost.
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
                if self._queue[0] is exchange:  # else the error is found again once the calls before are over
                    self._end(exchange, error)
                return False
            self._rouse_short(exchange, lengths)
        exchange.verified = True
        return True

    def _rouse_short(self, exchange: Exchange, lengths: Sequence[int]) -> None:
        """Ring the ranks that took the call for one of a single step, so that they move its later steps."""
        if exchange.steps == 1:
            return
        for index, length in enumerate(lengths):
            if length == 1 and index != self.region.index:
                self._bells.ring(index)

    def misfit(
        self, exchange: Exchange, slot: int, found: tuple[int, int, int, int], row: int
    ) -> CollectiveMismatchError:
        """Return the error for an all_to_all whose splits do not fit (``Region.misfit``)."""
        *pair, given, taken = found
        lines = [self.region.text(rank, slot).rpartition(" at ")[2] for rank in pair]
        sender, receiver = (self._ranks[rank] for rank in pair)
        rows, expected = given // row, taken // row
        return misfit(self._where, (sender, receiver), rows, expected, lines, exchange.place)

    def _disagree(self, exchange: Exchange, *, shared: bool) -> None:
        """End a call about which ranks differ, with an error that shows what each of them called.

        If the call is ``shared``, one of several parts, ranks may also differ about the number of parts. Then
        nothing moves in this region any more: each rank has the lane begin a new epoch, in another region.
        Do nothing while other calls are before this one: the difference is found again when they are over.
        """
        if self._queue[0] is not exchange:
            return
        slot = exchange.first % SLOTS
        texts = [self.region.text(rank, slot) for rank in range(self.region.size)]
        error = mismatch(self._where, self._ranks, texts, place=exchange.place)
        if shared:
            # First, so that an interrupt before it leaves all to the next look.
            self._bells.later(partial(self._end_halted, exchange, error))
            self._halted = True
        else:
            self._end(exchange, error)

    def _end_halted(self, exchange: Exchange, error: CollectiveError) -> None:
        """Have the lane halted, and only then end the call. Runs on a thread that may wait.

        A waiter that woke earlier could make its next call here, where it would be lost.
        """
        try:
            exchange.disagreed(exchange.place, error)
        finally:
            with self._lock:
                if self._queue and self._queue[0] is exchange:
                    self._end(exchange, error)
            self.tell()

    def _take(self, exchange: Exchange) -> bool:
        """Combine and take a step of the oldest call if possible; return whether anything was done."""
        words, mine = self._words, self._mine
        first, combines = exchange.first, exchange.combines
        if not first:
            return False
        if exchange.finished:  # an interrupt came before the call was taken from the queue
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
        """Whether all ranks have reduced their parts of that step."""
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
        """End the oldest call. If it was not made by all ranks, count its one posted step as read."""
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

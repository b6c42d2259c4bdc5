"""Calls are compared with those of ranks on other nodes, whose memory cannot be seen, before they are made.

Ranks that have made the same calls expect the same next one (`Prediction`). A call that was to be expected is
made at once. One that was not is made only once a rank of every other node is known to call the same: this
rank tells them what it calls, and holds the call until each has said so, in its answer or in a note of its
own. So of two ranks that differ about a call one at least calls what was not to be expected, holds it, and
hears of the other's before it makes it. A rank that has made the call it expected, and then hears of another
one, refuses it, which ends it on every rank (``cut``).

Ranks of one node compare their calls among themselves (`Compared`) before they tell others, so that one rank
of each node speaks for all. The first calls after all ranks were in step are compared with each other, then
the second ones, and so on: where one rank goes on with parts of a call, and another with the next one, these
differ. What is announced is kept until it is over and for a while longer; what was not to be expected, as
long as there is room: a rank of another node may ask about it much later, when one beside it has said for
both what they call.

Lock order: a lane's lock, then ``Confirmations``'. What is settled drives lanes, so it is settled by a thread
of the world's own, which holds neither, and not by the one that answers. Who has been silent is told again by
another one, so that calls which do not need that rank are not held up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from asynccoll import host
from asynccoll.health.accounts import NOTE
from asynccoll.health.checks import mismatch
from asynccoll.health.prediction import Prediction
from asynccoll.transport.completion import Promise

if TYPE_CHECKING:
    from asynccoll.errors import CollectiveMismatchError
    from asynccoll.order.lane import Lane

__all__ = ["Announced", "Confirmations", "Confirming"]

#: How long a rank may take to take a note, and how soon it is sent again to one that has not.
TELL_SECONDS = 0.5
AGAIN_SECONDS = 0.05
#: Calls of a lane that are over, and still known; those of them that were not to be expected; and notes for
#: calls that are still to come.
OVER = 256
MOST_UNEXPECTED = 4096
MOST_NOTES = 1024
_CLOSE_SECONDS = 1.0

#: Sends a question to ranks: what those answer that take it.
Ask = Callable[[Collection[int], str, float], Mapping[int, Mapping[str, Any]]]


class Where(NamedTuple):
    """Which call of a lane: the ``nth`` after ``since``, when all ranks were in step."""

    since: int
    nth: int


class Announced(NamedTuple):
    """A call that a rank is about to make."""

    #: a checksum of it and all before it
    word: int
    #: of it alone
    checksum: int
    place: int
    part: int
    #: how it is told
    text: Callable[[], str]


class Note(NamedTuple):
    """What another rank calls."""

    word: int
    place: int
    part: int
    text: str

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Note:
        """As ``_plain`` has written it."""
        return cls(int(said["word"]), int(said["place"]), int(said["part"]), str(said["text"]))


@dataclass
class _Held:
    """A call that was not to be expected, until it is known what the other nodes call."""

    confirming: Confirming
    where: Where
    call: Announced
    #: ranks that are still to be told
    untold: set[int]
    #: of each other node its ranks, until one of them has called the same
    unheard: list[tuple[int, ...]]
    differ: dict[int, Note] = field(default_factory=dict)
    promise: Promise = field(default_factory=Promise)
    settled: bool = False

    def learn(self, rank: int, note: Note) -> None:
        """``rank`` calls that."""
        if note.word != self.call.word:
            self.differ[rank] = note
        self.unheard = [ranks for ranks in self.unheard if rank not in ranks]

    def is_of(self, name: str, where: Where) -> bool:
        """Whether it is that call, and not made yet."""
        return not self.settled and self.where == where and self.confirming.name == name

    @property
    def is_over(self) -> bool:
        """Whether enough is known to make the call, or not to."""
        return bool(self.differ) or not self.unheard


class Confirmations:
    """Those of one rank's world: the thread that tells and settles, and the notes that have come early."""

    def __init__(self, rank: int, ask: Ask) -> None:
        self.rank: int = rank
        self.lock: host.Lock = host.Lock()
        self.notes: dict[tuple[str, Where], dict[int, Note]] = {}
        self._ask = ask
        self._lanes: WeakValueDictionary[str, Confirming] = WeakValueDictionary()
        self._held: list[_Held] = []
        self._late: list[tuple[Confirming, Where, Announced, dict[int, Note]]] = []
        self._wanted = host.Event()
        self._thread: host.Thread | None = None
        #: who has not taken a note that was sent, and who tells them again
        self._silent: set[int] = set()
        self._again: host.Thread | None = None
        self._closed = False

    @property
    def is_telling(self) -> bool:
        """Whether others are still to be told what this rank has called."""
        return any(held.untold for held in self._held)

    def add(self, confirming: Confirming) -> None:
        """Notes for its lane are for it."""
        with self.lock:
            self._lanes[confirming.name] = confirming
            if self._thread is None and not self._closed:
                self._thread = host.Thread(target=self._run, name="asynccoll-confirming", daemon=True)
                self._thread.start()

    def hold(self, held: _Held) -> None:
        """Tell whom it names, and settle its promise once all is known. With the lock held."""
        self._held.append(held)
        self._wanted.set()

    def drop(self, confirming: Confirming) -> None:
        """Nobody waits any more for what that lane has held."""
        with self.lock:
            self._held = [held for held in self._held if held.confirming is not confirming]
            for at in [
                at for at in self.notes if at[0] == confirming.name and at[1].since < confirming.since
            ]:
                del self.notes[at]

    def hear(self, question: str) -> Mapping[str, object]:
        """A note has come; what this rank calls there, if it has come so far. In the answering thread."""
        said = json.loads(question.removeprefix(NOTE))
        name, where = str(said["lane"]), Where(*map(int, said["where"]))
        rank, note = int(said["rank"]), Note.of(said)
        with self.lock:
            held = next((one for one in self._held if one.is_of(name, where)), None)
            if held is not None:
                held.learn(rank, note)
                self._wanted.set()
                return _plain(held.call)
            self._note(name, where, rank, note)
            confirming = self._lanes.get(name)
            made = None if confirming is None else confirming.made(where, note)
            if confirming is None or made is None:
                return {}
            del self.notes[name, where]
            if made.word != note.word:
                self._late.append((confirming, where, made, {rank: note}))
                self._wanted.set()
            return _plain(made)

    def _note(self, name: str, where: Where, rank: int, note: Note) -> None:
        if len(self.notes) >= MOST_NOTES:
            del self.notes[next(iter(self.notes))]
        self.notes.setdefault((name, where), {})[rank] = note

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            with self.lock:
                late, self._late = self._late, []
                self._held = [held for held in self._held if not held.confirming.is_broken]
                untold = [(held, ranks) for held in self._held if (ranks := held.untold - self._silent)]
            for confirming, where, made, differ in late:
                confirming.refuse(where, made, differ)
            for held, ranks in untold:
                self._tell(held, ranks)
            self._settle()
            self._have_told_again()

    def _have_told_again(self) -> None:
        """Start who tells the silent, if there are any, and nobody does."""
        with self.lock:
            if self._again is None and not self._closed and any(self._still_untold()):
                self._again = host.Thread(
                    target=self._tell_again, name="asynccoll-confirming-again", daemon=True
                )
                self._again.start()

    def _still_untold(self) -> list[tuple[_Held, set[int]]]:
        return [(held, ranks) for held in self._held if (ranks := held.untold & self._silent)]

    def _tell_again(self) -> None:
        """Tell the silent until there are none."""
        while True:
            with self.lock:
                untold = self._still_untold()
                if self._closed or not untold:
                    self._again = None
                    return
            for held, ranks in untold:
                self._tell(held, ranks)
            self._wanted.set()
            host.sleep(AGAIN_SECONDS)

    def _tell(self, held: _Held, ranks: Collection[int]) -> None:
        question = NOTE + json.dumps(
            {
                "lane": held.confirming.name,
                "where": held.where,
                "rank": self.rank,
                **_plain(held.call),
            }
        )
        answers = self._ask(frozenset(ranks), question, TELL_SECONDS)
        with self.lock:
            self._silent = (self._silent | set(ranks)) - answers.keys()
            for rank, answer in answers.items():
                held.untold.discard(rank)
                if "word" in answer:
                    held.learn(rank, Note.of(answer))

    def _settle(self) -> None:
        """Let go of which enough is known; what others are still to be told is kept until they are."""
        with self.lock:
            over = [held for held in self._held if held.is_over and not held.settled]
            for held in over:
                held.settled = True
            self._held = [held for held in self._held if held.untold or not held.settled]
        for held in over:
            error = held.confirming.error(held.call, held.differ) if held.differ else None
            held.promise.settle(error)

    def close(self) -> None:
        """Nothing is held any more, nor told."""
        self._closed = True
        self._wanted.set()
        for thread in (self._thread, self._again):
            if thread is not None and thread is not host.current_thread():
                thread.join(_CLOSE_SECONDS)


class Confirming:
    """Of one lane. ``call`` is used with the lane's lock held."""

    def __init__(self, lane: Lane, all_of_them: Confirmations, nodes: Mapping[int, int]) -> None:
        """``nodes``: that of each rank of the lane."""
        said = f"{lane.group.key}/{lane.key}"
        self.name: str = hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
        self.since: int = lane.epoch
        self._lane = lane
        self._all = all_of_them
        self._prediction = Prediction()
        #: what was called since then, by its number; the oldest that is there, and when to forget some
        self._said: dict[int, Announced] = {}
        self._oldest = 1
        self._most = 2 * OVER
        #: those of them that could not be expected; up to where they are not all there
        self._unexpected: dict[int, Announced] = {}
        self._forgotten = 0
        by_node: dict[int, list[int]] = {}
        for rank, node in nodes.items():
            by_node.setdefault(node, []).append(rank)
        own = by_node.pop(nodes[all_of_them.rank])
        self._others = [tuple(ranks) for ranks in by_node.values()]
        place = own.index(all_of_them.rank)
        self._counterparts = {ranks[place % len(ranks)] for ranks in self._others}
        all_of_them.add(self)

    @property
    def is_broken(self) -> bool:
        """Whether the lane is given up, and with it whatever it holds."""
        return self._lane.broken is not None

    def restart(self, since: int) -> None:
        """Ranks are in step again, whatever each has called before."""
        self._said, self._oldest = {}, 1
        self._unexpected, self._forgotten = {}, 0
        self.since = since
        self._prediction.restart()
        self._all.drop(self)

    def call(self, call: Announced, nth: int) -> CollectiveMismatchError | Promise | None:
        """A call that is about to be made. What to raise instead, or to wait for first; None: make it.

        ``nth``: of those since all ranks were in step.
        """
        expected = self._prediction.expects(call.checksum << 1 | (call.part > 1))
        if expected:
            # First said, then looked; a note is first kept, then compared with what was said. So one of the
            # two threads finds the other's.
            self._say(nth, call)
            if not self._all.notes:
                return None
        return self._look(call, Where(self.since, nth), expected)

    def _look(
        self, call: Announced, where: Where, expected: bool
    ) -> CollectiveMismatchError | Promise | None:
        with self._all.lock:
            notes = self._all.notes.pop((self.name, where), {})
            if expected and not notes:
                return None
            held = _Held(self, where, call, {*self._counterparts, *notes}, list(self._others))
            for rank, note in notes.items():
                held.learn(rank, note)
            if not expected:
                self._say(where.nth, call)
                self._keep(where, call)
            if held.differ:
                return self.error(call, held.differ)
            self._all.hold(held)
            return held.promise if held.unheard else None

    def _say(self, nth: int, call: Announced) -> None:
        self._said[nth] = call
        if len(self._said) >= self._most:
            self._forget()

    def _forget(self) -> None:
        """Of what is over the latest are kept; of what is in flight, all."""
        while len(self._said) > OVER and self._lane.is_over(self._said[self._oldest].place):
            del self._said[self._oldest]
            self._oldest += 1
        self._most = 2 * len(self._said)

    def _keep(self, where: Where, call: Announced) -> None:
        if len(self._unexpected) >= MOST_UNEXPECTED:
            self._forgotten = max(self._unexpected)
            self._unexpected.clear()
        self._unexpected[where.nth] = call

    def made(self, where: Where, note: Note) -> Announced | None:
        """What was called there, if it was; to who calls what ``note`` says, and could not expect it."""
        if where.since != self.since:
            return None
        found = self._said.get(where.nth) or self._unexpected.get(where.nth)
        if found is not None or where.nth >= self._oldest:
            return found
        if where.nth <= self._forgotten:
            return Announced(note.word, 0, note.place, note.part, lambda: note.text)
        # This rank had expected it, so it is another one.
        return Announced(~note.word, 0, note.place, note.part, lambda: "another call, which is over")

    def error(self, call: Announced, others: Mapping[int, Note]) -> CollectiveMismatchError:
        """What this rank calls, and what ``others`` do."""
        texts = {self._all.rank: call.text(), **{rank: note.text for rank, note in others.items()}}
        ranks = sorted(texts)
        begins = min((call.place, call.part), *((note.place, note.part) for note in others.values()))
        return mismatch(self._lane, ranks, [texts[rank] for rank in ranks], begins)

    def refuse(self, where: Where, call: Announced, others: Mapping[int, Note]) -> None:
        """The call there was made, and others make another one."""
        if where.since == self.since:
            error = self.error(call, others)
            place, part = error.begins or (call.place, call.part)
            self._lane.world.refuse(self._lane, error, place, part=part)


def _plain(call: Announced) -> dict[str, object]:
    return {"word": call.word, "place": call.place, "part": call.part, "text": call.text()}

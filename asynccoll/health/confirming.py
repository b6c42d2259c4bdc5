"""Compare calls with those of ranks on other nodes, whose memory this rank cannot read, before they are made.

Ranks that have made the same calls expect the same next one (`Prediction`). An expected call is made at once.
An unexpected call is made only once a rank of every other node is known to make the same one: this rank sends
a *note* of it to them, and holds the call until each has confirmed it, in its answer or in a note of its own.
So if two ranks differ about a call, the call of at least one of them is unexpected: that rank holds it, and
learns of the other rank's call before making its own. A rank that has made the call it expected, and then
learns of a different one, refuses it, which ends the call on every rank (``order.cut``).

Ranks on one node compare their calls among themselves (`Compared`) before they notify other nodes, so one
rank speaks for its node. Calls are numbered from the last time that all ranks were in step, and calls with
the same number are compared: if one rank continues with parts of a call while another makes the next call,
these differ. Calls that were made are remembered until some time after they are over. Unexpected ones are
remembered as long as there is room, as a rank of another node may ask about one much later, if another rank
of its node has already confirmed the call for both.

Lock order: a lane's lock, then that of ``Confirmations``. Settling a promise drives lanes, whose next calls
may block (when a backend first connects to a peer, say) until other ranks make theirs; and these may be held
until they hear from this rank. So one thread settles, which holds neither lock, and others answer questions
and send notes. A third one sends notes again to ranks that have not answered, so that calls that do not need
these ranks are not delayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from asynccoll import host
from asynccoll.errors import CollectiveMismatchError, collective_error
from asynccoll.health.accounts import NOTE
from asynccoll.health.checks import mismatch
from asynccoll.health.prediction import Prediction
from asynccoll.host.helpers import start_once
from asynccoll.order.lane import Lane
from asynccoll.transport.completion import Promise

#: How long a rank may take to answer a note, and the pause before the note is sent again if it has not.
TELL_SECONDS = 0.5
AGAIN_SECONDS = 0.05
#: How many calls of a lane that are over are remembered; how many unexpected ones; and for how many calls
#: that this rank has not made yet the notes of other ranks are kept.
OVER = 256
MOST_UNEXPECTED = 4096
MOST_NOTES = 1024
_CLOSE_SECONDS = 1.0

#: Sends a question to ranks, and returns the answers of those that answer within the seconds given.
Ask = Callable[[Collection[int], str, float], Mapping[int, Mapping[str, Any]]]


class Where(NamedTuple):
    """The position of a call on its lane: ``nth`` since ``restart`` number ``since``, with ranks in step."""

    since: int
    nth: int


class Announced(NamedTuple):
    """A call that a rank is about to make."""

    #: a checksum of this call and all calls before it
    word: int
    #: a checksum of this call alone
    checksum: int
    place: int
    part: int
    #: the call in words
    text: Callable[[], str]


class Note(NamedTuple):
    """A call that another rank has announced."""

    word: int
    place: int
    part: int
    text: str

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Note:
        """Return the note that ``_plain`` has written as ``said``."""
        return cls(int(said["word"]), int(said["place"]), int(said["part"]), str(said["text"]))


@dataclass
class _Held:
    """An unexpected call that is held until the calls of the other nodes are known."""

    confirming: Confirming
    where: Where
    call: Announced
    #: ranks that have yet to answer the note
    untold: set[int]
    #: the ranks of each other node none of whose ranks has announced its call yet
    unheard: list[tuple[int, ...]]
    differ: dict[int, Note] = field(default_factory=dict)
    promise: Promise = field(default_factory=Promise)
    settled: bool = False

    def learn(self, rank: int, note: Note) -> None:
        """Take into account that ``rank`` announced the call of ``note``, unless that is decided already.

        With the lock held. ``settle`` reads ``differ`` without it, on another thread.
        """
        if self.settled:
            return
        if note.word != self.call.word:
            self.differ[rank] = note
        self.unheard = [ranks for ranks in self.unheard if rank not in ranks]

    def settle(self) -> None:
        """Have the call made, or refused."""
        self.promise.settle(self.confirming.error(self.call, self.differ) if self.differ else None)

    def is_of(self, name: str, where: Where) -> bool:
        """Whether it is the call at ``where`` on the lane ``name``, and is still held."""
        return not self.settled and self.where == where and self.confirming.name == name

    @property
    def is_over(self) -> bool:
        """Whether enough is known to make the call, or to refuse it."""
        return bool(self.differ) or not self.unheard


class Confirmations:
    """The held calls of all lanes of a rank, the threads that announce and settle them, and early notes."""

    def __init__(self, rank: int, ask: Ask) -> None:
        self.rank: int = rank
        self.lock: host.Lock = host.Lock()
        self.notes: dict[tuple[str, Where], dict[int, Note]] = {}
        self._ask = ask
        self._lanes: WeakValueDictionary[str, Confirming] = WeakValueDictionary()
        self._held: list[_Held] = []
        self._wanted = host.Event()
        self._telling: host.Thread | None = None
        #: what is left to do about calls that were compared: settle them, or refuse them
        self._decided: list[Callable[[], object]] = []
        self._left = host.Event()
        self._settling: host.Thread | None = None
        #: the ranks that have not answered a note, and the thread that sends it again
        self._silent: set[int] = set()
        self._again: host.Thread | None = None
        self._closed = False

    @property
    def is_telling(self) -> bool:
        """Whether other ranks have yet to answer a note of this rank."""
        return any(held.untold for held in self._held)

    def add(self, confirming: Confirming) -> None:
        """Pass notes for the lane of ``confirming`` to it from now on."""
        with self.lock:
            self._lanes[confirming.name] = confirming
            if self._telling is None and not self._closed:
                tell = partial(self._run, self._wanted, self._look)
                start_once("asynccoll-confirming", tell, partial(setattr, self, "_telling"))
            if self._settling is None and not self._closed:
                settle = partial(self._run, self._left, self._settle)
                start_once("asynccoll-confirmed", settle, partial(setattr, self, "_settling"))

    def hold(self, held: _Held) -> None:
        """Have the thread announce the call, and settle it once enough is known. With the lock held."""
        self._held.append(held)
        self._wanted.set()

    def drop(self, confirming: Confirming) -> None:
        """Forget the lane's held calls, and the notes from before its ``since``."""
        with self.lock:
            self._held = [held for held in self._held if held.confirming is not confirming]
            for at in [
                at for at in self.notes if at[0] == confirming.name and at[1].since < confirming.since
            ]:
                del self.notes[at]

    def hear(self, question: str) -> Mapping[str, object]:
        """Process a note from another rank. Runs in the thread that answers.

        Returns the call that this rank holds or has made there, as ``_plain`` writes it; {} if neither.
        """
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
                self._decided.append(partial(confirming.refuse, where, made, {rank: note}))
                self._left.set()
            return _plain(made)

    def _note(self, name: str, where: Where, rank: int, note: Note) -> None:
        if len(self.notes) >= MOST_NOTES:
            del self.notes[next(iter(self.notes))]
        self.notes.setdefault((name, where), {})[rank] = note

    def _run(self, wanted: host.Event, action: Callable[[], None]) -> None:
        while not self._closed:
            wanted.wait()
            wanted.clear()
            try:
                action()
            except Exception as error:  # a bug of ours, or no thread can start: this one has to keep running
                with self.lock:
                    held, self._held = self._held, []
                for one in held:
                    one.confirming.lose(error)

    def _look(self) -> None:
        with self.lock:
            self._held = [held for held in self._held if not held.confirming.is_broken]
            untold = [(held, ranks) for held in self._held if (ranks := held.untold - self._silent)]
        for held, ranks in untold:
            self._tell(held, ranks)
        self._decide()
        self._have_told_again()

    def _have_told_again(self) -> None:
        """Start the thread that sends notes to silent ranks again, if it is needed and is not running."""
        with self.lock:
            if self._again is None and not self._closed and any(self._still_untold()):
                start_once("asynccoll-confirming-again", self._tell_again, partial(setattr, self, "_again"))

    def _still_untold(self) -> list[tuple[_Held, set[int]]]:
        return [(held, ranks) for held in self._held if (ranks := held.untold & self._silent)]

    def _tell_again(self) -> None:
        """Keep sending notes to the silent ranks until all of them have answered."""
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
            if self._silent & answers.keys():  # there may be earlier notes that it has not answered
                self._wanted.set()
            self._silent = (self._silent | set(ranks)) - answers.keys()
            for rank, answer in answers.items():
                held.untold.discard(rank)
                if "word" in answer:
                    held.learn(rank, Note.of(answer))

    def _decide(self) -> None:
        """Have the calls settled about which enough is known; keep those that are still to be announced."""
        with self.lock:
            over = [held for held in self._held if held.is_over and not held.settled]
            for held in over:
                held.settled = True
            self._held = [held for held in self._held if held.untold or not held.settled]
            self._decided += [held.settle for held in over]
        if over:
            self._left.set()

    def _settle(self) -> None:
        with self.lock:
            decided, self._decided = self._decided, []
        host.call_each(decided)

    def close(self) -> None:
        """End the threads: from now on no call is settled or announced."""
        with self.lock:  # threads are started with it held, and one that has not started cannot be joined
            self._closed = True
            threads = (self._telling, self._settling, self._again)
        self._wanted.set()
        self._left.set()
        for thread in threads:
            if thread is not None and thread is not host.current_thread():
                thread.join(_CLOSE_SECONDS)


class Confirming:
    """Compares one lane's calls with those of other nodes.

    ``call`` is used with the lane's lock held, or by the thread that drives the lane's queue.
    """

    def __init__(self, lane: Lane, all_of_them: Confirmations, nodes: Mapping[int, int]) -> None:
        """``nodes``: the number of each rank's node, for all ranks of the lane."""
        said = f"{lane.group.key}/{lane.key}"
        self.name: str = hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
        self.since: int = lane.epoch
        self._lane = lane
        self._all = all_of_them
        self._prediction = Prediction()
        #: the calls made since ``since``, by number; the lowest number kept; the size at which to forget some
        self._said: dict[int, Announced] = {}
        self._oldest = 1
        self._most = 2 * OVER
        #: the unexpected ones among them; and the number up to which some of these were forgotten
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
        """Whether the lane is broken, so that its held calls need no settling."""
        return self._lane.broken is not None

    def restart(self, since: int) -> None:
        """Restart the numbering with ``since``: all ranks are in step again, whatever they called before."""
        self._said, self._oldest = {}, 1
        self._unexpected, self._forgotten = {}, 0
        self.since = since
        self._prediction.restart()
        self._all.drop(self)

    def call(self, call: Announced, nth: int) -> CollectiveMismatchError | Promise | None:
        """Compare a call that is about to be made, the ``nth`` since all ranks were in step.

        Returns the error to raise instead, or a promise to wait for first, or None to make the call.
        """
        expected = self._prediction.expects(call.checksum << 1 | (call.part > 1))
        if expected:
            # This thread first records its call, then looks for notes; the answering thread first stores a
            # note, then looks for recorded calls. So at least one of the two finds the other's.
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
        """Forget calls that are over, except the latest ones; keep all that are in flight."""
        while len(self._said) > OVER and self._lane.is_over(self._said[self._oldest].place):
            self._oldest += 1  # first: the answering thread takes what is missing from there on for not made
            del self._said[self._oldest - 1]
        self._most = 2 * len(self._said)

    def _keep(self, where: Where, call: Announced) -> None:
        if len(self._unexpected) >= MOST_UNEXPECTED:
            self._forgotten = max(self._unexpected)
            self._unexpected.clear()
        self._unexpected[where.nth] = call

    def made(self, where: Where, note: Note) -> Announced | None:
        """Return the call that this rank made there, for a rank that made the unexpected call of ``note``.

        None if it has made none yet. If its call was forgotten, returns what that must have been: the same
        call, or another one.
        """
        if where.since != self.since:
            return None
        found = self._said.get(where.nth) or self._unexpected.get(where.nth)
        if found is not None or where.nth >= self._oldest:
            return found
        if where.nth <= self._forgotten:
            return Announced(note.word, 0, note.place, note.part, lambda: note.text)
        # The forgotten call is not an unexpected one, so this rank expected it: it differs from the note's.
        return Announced(~note.word, 0, note.place, note.part, lambda: "another call, which has completed")

    def error(self, call: Announced, others: Mapping[int, Note]) -> CollectiveMismatchError:
        """Return the error that names this rank's ``call`` and those of ``others``."""
        texts = {self._all.rank: call.text(), **{rank: note.text for rank, note in others.items()}}
        ranks = sorted(texts)
        begins = min((call.place, call.part), *((note.place, note.part) for note in others.values()))
        return mismatch(self._lane, ranks, [texts[rank] for rank in ranks], begins)

    def lose(self, error: Exception) -> None:
        """Lose the lane, as its calls can no longer be compared."""
        self._lane.lose(collective_error(error, f"comparing calls of {self._lane} with other hosts'"))

    def refuse(self, where: Where, call: Announced, others: Mapping[int, Note]) -> None:
        """Refuse a call that this rank has made, as ``others`` make a different one there."""
        if where.since == self.since:
            error = self.error(call, others)
            place, part = error.begins or (call.place, call.part)
            self._lane.world.refuse(self._lane, error, place, part=part)


def _plain(call: Announced) -> dict[str, object]:
    return {"word": call.word, "place": call.place, "part": call.part, "text": call.text()}

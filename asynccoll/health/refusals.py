"""What ranks tell each other about refused calls, so that no rank waits for a call that a peer refused.

``order.cut`` says what a refusal does to a lane, why that is sound, and what place, epoch, cut, statement and
verdict are. This module exchanges refusals and statements over the store, for each lane and epoch; every key
has one writer:

- ``refused/RANK``: what that rank refused, written at once; ``any`` lists the ranks with such a key. A rank
  that has waited for anything for a second (on MPI also a rank that waits for nothing) looks for these keys
  on all of its lanes, as a peer may wait for a call on a lane on which this rank waits for nothing. It reads
  one number, the count of all refusals in this world, and looks further only if that has changed.
- ``asynccoll/unmade/KIN/RANK``: the calls that child tasks of that rank have not made on lanes that it has
  not opened, but on which peers may wait. When it opens such a lane, it refuses all of them there.
- ``stated/RANK``: how far that rank went, once everything before the refused place is over there.

A separate thread sees each cut through: it listens for lower refusals, writes this rank's statement once that
is fixed, waits for the statements of all ranks, and has the lane resume. It ends with the lane or the
context, or if a rank that it waits for is lost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist

from asynccoll import host
from asynccoll.errors import AbortedError, CollectiveError, CollectiveTimeoutError, collective_error
from asynccoll.host.call_number import numbered
from asynccoll.host.endings import in_full
from asynccoll.host.helpers import Helpers
from asynccoll.host.store import Clients, enlist, values, values_of_listed
from asynccoll.order.cut import Cut, Refusal, Statement, Verdict
from asynccoll.order.lane import Lane
from asynccoll.transport.completion import Completion
from asynccoll.waiting.children import Unmade

#: Polling the store is cheap; these only bound how late a rank learns that the last peer answered.
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02
_ABSENT_PAUSE_SECONDS = 0.2
#: How often the thread that waits for statements checks whether all ranks are still alive.
_ASK_SECONDS = 1.0
_CLOSE_SECONDS = 1.0
#: How long waiters of a lost call wait for native code that may still write to its memory. That ends as the
#: lane leaves the connections, once all ranks have reached the refused call: usually within milliseconds.
_TELL_SECONDS = 1.0
_SETTLES = "asynccoll-settle"
#: The key for the number of refusals on all lanes.
_COUNT = "asynccoll/refusals"
#: The attribute that marks an error of which the peers have been told.
_TOLD = "_asynccoll_told"


class _Pace:
    """The pauses between two reads of the store, and the time limit for peers to answer."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._limit = lane.world.timeout
        self._asked = host.monotonic()
        self.hurry()

    def hurry(self) -> None:
        """After progress: start with short pauses again, and restart the time limit."""
        self._seconds = _FIRST_PAUSE_SECONDS
        self._ends = host.monotonic() + self._limit

    def wait_for_absent(self) -> None:
        """While a member has yet to open the lane: pause longer, and restart the time limit."""
        self._ends = host.monotonic() + self._limit
        self._seconds = _ABSENT_PAUSE_SECONDS

    def pause(self, *, for_peers: bool) -> None:
        """Sleep until the next read, and lose the lane if a rank that it waits for is lost.

        Raises ``TimeoutError`` if ``for_peers`` (peers have to answer now) and the time limit has passed.
        """
        now = host.monotonic()
        if now >= self._asked + _ASK_SECONDS:
            self._asked = now
            lost = self._lane.world.loss(self._lane)
            if lost is not None:
                self._lane.lose(lost)
        if for_peers and now >= self._ends:
            raise TimeoutError(f"not all ranks reported what they did within {self._limit} s")
        host.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE_SECONDS)


class Refusals:
    """This rank's refusals and statements, for all of its lanes."""

    def __init__(self, clients: Clients | None, rank: int) -> None:
        self._clients = clients
        self._rank = rank
        self._helpers = Helpers()
        #: Held while peers' refusals are read, and while this rank writes a statement: peers may delete their
        #: refusals of an epoch once this rank has stated the next one.
        self._reading = host.Lock()
        #: By kin, what is still to be written about calls that children have not made; the kin that the store
        #: already lists for this rank; and the lock of the threads that write.
        self._unmade: dict[str, str] = {}
        self._listed: set[str] = set()
        self._noting = host.Lock()

    # The rank that refuses

    def refuse(
        self,
        lane: Lane,
        reason: BaseException,
        place: int | None = None,
        *,
        spare: Completion | None = None,
        part: int | None = None,
        name: str = "",
        until: int = 0,
        count: int = 1,
    ) -> None:
        """Refuse the call at ``place`` (None: the next ``count``) on ``lane``, and tell peers the ``reason``.

        ``part`` is the first part of it that is refused (None: the one after the last accepted). Each
        ``reason`` is told once, however many layers of a call it passes through, until ``leaves_its_call``.
        The operation with the completion ``spare`` is not failed, as its waiter gets another error. ``name``
        is the name of a call made just now, for the record. ``until``: the calls from ``place`` to below this
        place are refused as well.
        """
        if self._clients is None or lane.group.size == 1 or getattr(reason, _TOLD, False):
            return
        vars(reason)[_TOLD] = True  # also where setting an attribute fails: some are frozen dataclasses
        self._settle(lane, lane.halting.refuse(in_full(reason), place, spare, part, name, until, count))

    def note(self, kin: str, unmade: Unmade, opened: Iterable[Lane]) -> None:
        """Tell peers that may wait on lanes not ``opened`` here which calls child tasks have not made."""
        if self._clients is None:
            return
        refusal = Refusal(
            self._rank, unmade.place, f"{AbortedError.__name__}: {unmade.why}", until=unmade.until
        )
        lanes = [(lane.group.key, lane.name) for lane in opened]
        self._unmade[kin] = json.dumps((_plain(refusal), lanes))
        if self._helpers.start(_SETTLES, partial(self._write_unmade, kin)) is None:
            self._write_unmade(kin)

    def _write_unmade(self, kin: str) -> None:
        with contextlib.suppress(RuntimeError), self._noting:  # the store may be gone, and its readers too
            if said := self._unmade.pop(kin, ""):  # else another thread has written the latest value
                with self._store() as store:
                    store.set(self._unmade_key(kin, self._rank), said)
                    if kin not in self._listed:
                        enlist(store, self._unmade_key(kin, "any"), self._rank)
                        self._listed.add(kin)
                    store.add(_COUNT, 1)

    def before_open(self, lane: Lane) -> None:
        """Publish what this rank refuses on a lane that it will open now, before any rank can issue there."""
        if self._clients is not None and (own := lane.halting.own) is not None:
            self._announce(lane, *own)

    def after_open(self, lane: Lane) -> None:
        """Read what peers have refused so far, before this rank issues on the lane."""
        if self._clients is None or lane.group.size == 1:
            return
        with self._store() as store:
            count = store.add(_COUNT, 0)
        if count:
            self._look(lane)

    # The ranks that wait for a refused call

    def look(self, lanes: Sequence[Lane]) -> None:
        """Halt those of ``lanes`` on which a peer has refused a call."""
        if self._clients is None:
            return
        with self._store() as store:
            count = store.add(_COUNT, 0)
        for lane in lanes:
            if lane.refusals_seen != count and not lane.halting.is_halted:
                self._look(lane)
                lane.refusals_seen = count

    def _look(self, lane: Lane) -> None:
        with self._reading:
            epoch = lane.epoch
            heard = self._heard(lane, epoch)
        for refusal in heard:
            self._settle(lane, lane.halting.hear(epoch, refusal))

    def published(self, lane: Lane) -> CollectiveError | None:
        """Return the error of a refusal that explains why a connection was closed, or None."""
        if self._clients is None:
            return None
        try:
            with self._reading:
                heard = self._heard(lane, lane.epoch)
        except RuntimeError:  # the store is gone with rank 0: then a lost peer explains the closed connection
            return None
        reached = [refusal for refusal in heard if refusal.place <= lane.sequence]
        first = min(reached, key=lambda refusal: refusal.place, default=None)
        return None if first is None else first.error(lane, first.place)

    # Both

    def _settle(self, lane: Lane, cut: Cut | None) -> None:
        """Start a thread that sees ``cut`` through, if it is a new one (not None)."""
        if cut is not None:
            sees = self._helpers.start(_SETTLES, partial(self._see_through, lane, cut))
            if sees is None:  # peers see the connections close
                why = "no thread can be started"
                lane.lose(CollectiveError(f"settling a refused call of {lane} failed: {why}"))

    def _see_through(self, lane: Lane, cut: Cut) -> None:
        following: Cut | None = cut
        try:
            while following is not None:
                cut, following = following, self._see_one_through(lane, following)
            tells = host.monotonic() + _TELL_SECONDS
            while lane.halting.tell(late=host.monotonic() >= tells):
                host.sleep(_FIRST_PAUSE_SECONDS)
        except Exception as error:  # the store is gone, or a rank does not report; else a bug of ours
            self._give_up(lane, cut, error)

    def _see_one_through(self, lane: Lane, cut: Cut) -> Cut | None:
        """See ``cut`` through from the refusal to the verdict. Returns the cut of the next epoch, if any."""
        told: Refusal | None = None
        pace, tells = _Pace(lane), host.monotonic() + _TELL_SECONDS
        while True:
            if cut.mine is not told:
                told = cut.mine
                self._announce(lane, cut.epoch, told)
            if lane.world.closed or lane.broken is not None:
                return None
            if not cut.stated and self._conclude(lane, cut):
                pace.hurry()
            if cut.stated and (statements := self._statements(lane, cut.epoch)) is not None:
                following = lane.halting.resume(cut, Verdict.of(statements))
                self._forget(lane, cut.epoch - 1)
                return following
            if cut.stated and not lane.has_opened:  # ranks that have yet to open it do not state anything yet
                self._hear(lane, cut.epoch)
                pace.wait_for_absent()
            lane.halting.tell(late=host.monotonic() >= tells)
            pace.pause(for_peers=cut.stated)

    def _conclude(self, lane: Lane, cut: Cut) -> bool:
        """Write this rank's statement if it is fixed now; returns whether it is."""
        self._hear(lane, cut.epoch)
        if lane.halting.conclude(cut):
            self._state(lane, cut)
        return cut.stated

    def _hear(self, lane: Lane, epoch: int) -> None:
        for refusal in self._heard(lane, epoch):
            lane.halting.hear(epoch, refusal)

    def _give_up(self, lane: Lane, cut: Cut, error: BaseException) -> None:
        if not isinstance(error, TimeoutError):  # peers learn of the refusal only as the connections close
            lane.lose(
                lane.world.diagnose(lane, collective_error(error, f"settling a refused call of {lane}"))
            )
            return
        lost: CollectiveError | None = lane.world.loss(lane)
        if lost is None:
            after = f"after call {numbered(cut.place)} was refused"
            lost = CollectiveTimeoutError(f"{lane}: {after}, the other ranks did not respond ({error})")
        lane.break_off(lost)

    # Keys

    def _key(self, lane: Lane, epoch: int, *parts: object) -> str:
        return "/".join(map(str, ("asynccoll/refused", lane.group.key, lane.key, epoch, *parts)))

    def _unmade_key(self, kin: str, of: object) -> str:
        return f"asynccoll/unmade/{kin}/{of}"

    def _store(self) -> AbstractContextManager[dist.Store]:
        assert self._clients is not None
        return self._clients.borrow()

    def _announce(self, lane: Lane, epoch: int, refusal: Refusal | None) -> None:
        with self._store() as store:
            store.set(self._key(lane, epoch, "refused", self._rank), json.dumps(_plain(refusal)))
            enlist(store, self._key(lane, epoch, "any"), self._rank)
            store.add(_COUNT, 1)  # last, so that a rank that sees the new count finds the keys

    def _heard(self, lane: Lane, epoch: int) -> list[Refusal]:
        """Return the refusals of peers in ``epoch``."""
        peers = [rank for rank in lane.group.ranks if rank != self._rank]
        with self._store() as store:
            keys = {rank: self._key(lane, epoch, "refused", rank) for rank in peers}
            listed = values_of_listed(store, self._key(lane, epoch, "any"), keys)
            found = [Refusal(**json.loads(said)) for said in listed]
            if epoch == 0:
                keys = {rank: self._unmade_key(lane.kin, rank) for rank in peers}
                mine = [lane.group.key, lane.name]
                for said in values_of_listed(store, self._unmade_key(lane.kin, "any"), keys):
                    refusal, opened = json.loads(said)
                    found += [Refusal(**refusal)] * (mine not in opened)
        return found

    def _state(self, lane: Lane, cut: Cut) -> None:
        said = {
            "issued": cut.issued,
            "reached": cut.reached,
            "refusal": _plain(cut.mine),
            "ends": cut.ends,
        }
        with self._reading, self._store() as store:
            store.set(self._key(lane, cut.epoch, "stated", self._rank), json.dumps(said))

    def _statements(self, lane: Lane, epoch: int) -> list[Statement] | None:
        """Return the statements of all ranks, in rank order; None as long as any is missing."""
        keys = [self._key(lane, epoch, "stated", rank) for rank in lane.group.ranks]
        with self._store() as store:
            if not store.check(keys):
                return None
            return [_statement(json.loads(said)) for said in values(store, keys)]

    def _forget(self, lane: Lane, epoch: int) -> None:
        """Delete this rank's keys of ``epoch``: all ranks have stated the next one, so none reads these."""
        mine = [self._key(lane, epoch, kind, self._rank) for kind in ("refused", "stated")]
        if self._rank == lane.group.ranks[0]:
            mine.append(self._key(lane, epoch, "any"))
        with contextlib.suppress(NotImplementedError, RuntimeError), self._store() as store:
            for key in mine:
                store.delete_key(key)

    def close(self) -> None:
        """Wait a bounded time for these threads, which end because the context is closed."""
        self._helpers.join(_CLOSE_SECONDS)


def leaves_its_call(error: BaseException) -> None:
    """Note that ``error`` is now passed on to the user: raised again, it is the reason for another refusal.

    A future, for example, raises the same exception each time that its result is asked for.
    """
    vars(error).pop(_TOLD, None)  # a single rank has no peers to tell


def _plain(refusal: Refusal | None) -> dict[str, object] | None:
    return None if refusal is None else asdict(refusal)


def _statement(said: dict[str, Any]) -> Statement:
    refusal = said["refusal"]
    own = None if refusal is None else Refusal(**refusal)
    return Statement(said["issued"], said["reached"], own, said["ends"])

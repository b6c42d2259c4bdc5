"""Explains why a lane of this rank has failed or waits: which rank is gone, has refused, or has not called.

Asks liveness, refusals, farewells and the ranks' records, and turns the answers into errors and warnings
that name the culprit. It must not decide what happens to the lane.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

from asynccoll import host
from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError, collective_error
from asynccoll.flight import Call, Flight, Recorder, dumps, lane_id, parting, read, reason, strayed
from asynccoll.health.accounts import Account
from asynccoll.health.blame import Awaited, Blame, blame, ended_before
from asynccoll.health.checks import mismatch
from asynccoll.health.liveness import Liveness
from asynccoll.health.refusals import Refusals
from asynccoll.health.stalls import warn
from asynccoll.host.call_number import numbered
from asynccoll.host.store import Clients, is_of_store
from asynccoll.host.words import enumerated, listed
from asynccoll.order.lane import DEFAULT, Lane
from asynccoll.order.operation import Operation
from asynccoll.transport.backend import Backend
from asynccoll.world.farewells import Farewells, failed_on, made_on
from asynccoll.world.group import Group

#: How long to probe whether rank 0, which may have served the store, is gone along with it.
STORE_SECONDS = 0.3
#: Errors within this time share the records that were saved for the first of them.
DUMP_SECONDS = 10.0
#: The start of the last words of a rank that has left: dropped, since the error says so already.
_LEFT = "it left its world (finalize), "


class Surroundings(Protocol):
    """What ``Failures`` needs of a rank's context."""

    rank: int
    closed: bool
    thread_rank: bool
    backend: Backend
    clients: Clients | None
    liveness: Liveness
    refusals: Refusals
    farewells: Farewells
    recorder: Recorder
    world: Group

    def store_answers(self) -> bool:
        """Whether the rank that may serve the store answers."""

    def refuse(self, lane: Lane, reason: BaseException, place: int, *, part: int) -> None:
        """Tell the peers that this rank does not make a part of a call."""


class Failures:
    """Explanations of the failures and stalls of one rank's lanes."""

    def __init__(self, context: Surroundings) -> None:
        self._context = context
        self._rank = context.rank
        self._clients = context.clients
        self._liveness = context.liveness
        self._dumped = -math.inf  # when records were last saved
        self._kept = False  # whether that saved any

    def without_store(self, lane: Lane, error: BaseException) -> CollectiveError:
        """Return the error for ``lane`` if it cannot connect its ranks because the store is gone."""
        if self._context.closed or self._clients is None:
            return collective_error(error, f"opening {lane}")
        lost = self._liveness.lost((0,), patience=STORE_SECONDS) if self._rank > 0 else ()
        by = f", and so is {self._liveness.describe(0)}, which may have served it" if lost else ""
        address = self._clients.address
        named = PeerLostError(
            f"{lane} cannot connect its ranks: the store that they need for it ({address}) is "
            f"gone{by}. Existing connections keep working. To survive this, use groups and lanes of the "
            "survivors beforehand, or use a file as the store (init_method='file:///...')",
            lost,
        )
        named.__cause__ = error
        return named

    def diagnose(self, lane: Lane, error: CollectiveError) -> CollectiveError:
        """Return the same failure with its culprit named: a dead rank, or a refusal that a peer published."""
        if isinstance(error, CollectiveMismatchError):
            return self._strayed(lane, error)
        storeless = self._clients is not None and self._clients.is_gone and is_of_store(error.__cause__)
        if storeless and not error.ranks:
            return self.without_store(lane, error)
        if error.ranks or type(error) not in (PeerLostError, CollectiveError):
            return error
        # A rank that refused this call may have exited because of that. Its refusal says why, unless the
        # store is gone with it.
        refused = self._context.refusals.published(lane) if self._context.store_answers() else None
        if refused is not None:
            refused.__cause__ = error
            return refused
        lost = self.loss(lane, error)
        if lost is not None or type(error) is CollectiveError:  # its text points to no peer
            return lost or error
        return self.loss(lane, error, leaving=True) or error

    def _strayed(self, lane: Lane, error: CollectiveMismatchError) -> CollectiveMismatchError:
        """Return the same mismatch, with the earlier place at which a rank seems to have skipped a call."""
        found = parting(self._liveness.recorded(), *lane_id(lane.group.key, lane.key), lane.name)
        if found is None or found.strayed is None or not found.strayed.comes_late:
            return error
        if error.place not in (0, found.agreed + 1):
            return error  # ``found`` is about an earlier mismatch, which the program has caught
        if len({call.place for call in found.calls.values() if call is not None}) < 2:
            return error  # all ranks called from one line: lines that differed before were no sign of it
        told = CollectiveMismatchError(f"{error}\n({found.strayed})")
        told.begins, told.place, told.__cause__ = error.begins, error.place, error.__cause__
        return told

    def loss(
        self, lane: Lane, error: CollectiveError | None = None, *, leaving: bool = False
    ) -> PeerLostError | None:
        """Return the error that names the ranks that the lane's group needs and that are gone, or None.

        ``error``: a failure that may be due to a rank that has just gone; ranks are then probed for a short
        while. Without it, a rank that has left is named only if the lane still needs it. ``leaving``: also
        name ranks whose record says that they have begun to leave.
        """
        members = lane.group.ranks
        ranks = self._context.world.ranks if self._context.backend.leaves_together else members
        lost = (
            self._liveness.lost(ranks, routine=True)
            if error is None
            else self._liveness.leaving(ranks)
            if leaving
            else self._liveness.lost(ranks, patience=0.3)
        )
        # Rank 0 may stay for the store after it has left, and a rank that has closed its connections may live
        # a little longer: both have left although their beacons still answer.
        may_stay = self._context.backend.leaves_together or (error is not None and not lost)
        staying = members if may_stay else {0}.intersection(members)
        asked = {*lost, *staying} - {self._rank}
        left = self._context.farewells.of(asked) if self._context.store_answers() else {}
        lost = self._guilty(lane, tuple(sorted({*lost, *left})), left, error)
        if not lost:
            return None
        # An error without a cause is ours, not a library's, and says only that these ranks have left.
        heard = f"; {error if error is not None and error.__cause__ else f'{lane} cannot go on'}"
        named = PeerLostError(
            f"{self._ended(lost, left)}{heard}{self._skipped(lane, lost, left)}{self.dump()}",
            lost,
            left=tuple(rank for rank in lost if rank in left),
        )
        named.__cause__ = error.__cause__ if error is not None else None
        return named

    def _ended(self, lost: tuple[int, ...], left: Iterable[int]) -> str:
        """Say which of ``lost`` have ``left`` and which are gone; if the first kind is one rank, also how."""
        leavers = tuple(rank for rank in lost if rank in left)
        others = tuple(rank for rank in lost if rank not in leavers)
        told = [
            f"{', '.join(map(self._liveness.describe, ranks))} {how}"
            for ranks, how in ((leavers, "has left its world (finalize)"), (others, "is gone"))
            if ranks
        ]
        first = leavers or others
        if len(first) == 1 and (words := self._liveness.last_words(first[0])):
            told[0] += f" ({words.removeprefix(_LEFT)})"
        return ", and ".join(told)

    def _guilty(
        self,
        lane: Lane,
        lost: tuple[int, ...],
        left: Mapping[int, Mapping[str, int]],
        error: CollectiveError | None,
    ) -> tuple[int, ...]:
        """Return those of ``lost`` that may explain ``error``: not ranks that left after all their calls."""
        made = made_on(lane, left)
        if error is None:  # operations in flight may still complete
            guilty = tuple(r for r in lost if r not in made or lane.needs(r, made[r]))
        else:  # a call has failed: because of the ranks that never made it, if there are any
            guilty = tuple(r for r in lost if r not in made or made[r] < lane.sequence) or lost
        # If a rank was killed, the others that have left did so because they learned of that.
        return self._liveness.killed(guilty) or guilty

    def _skipped(self, lane: Lane, lost: tuple[int, ...], left: Mapping[int, Mapping[str, int]]) -> str:
        """Return where one of ``lost`` may have skipped a call, if it made fewer than this rank; else ""."""
        made = made_on(lane, {rank: said for rank, said in left.items() if not failed_on(lane, said)})
        fewer = {rank: number for rank, number in made.items() if 0 < number < lane.sequence}
        rank = next((rank for rank in lost if rank in fewer), None)
        if rank is None:
            none = [rank for rank in lost if lane.sequence and made.get(rank) == 0]
            closed = "" if lane.name == DEFAULT else f", or closed {lane}"
            return f"; {listed(none)} made no call there{closed}: {reason(lane.name)}" if none else ""
        recorded = self._liveness.recorded()
        both = {one: recorded[one] for one in (self._rank, rank) if one in recorded}
        where = strayed(both, *lane_id(lane.group.key, lane.key))
        likely = where is not None and where.comes_late
        why = where if likely else "here or before, or had fewer to make (a loop that ends earlier, say)"
        said = f"skipped a call, {why}"
        if (refused := _refused_after(fewer[rank], lane, recorded.get(rank))) is not None:
            said = f"{refused.refusal(refused.operation)} (it left before it could tell others)"
        return (
            f"; rank {rank}'s last call there was {numbered(fewer[rank])}, and this rank is at "
            f"{numbered(lane.sequence)}: rank {rank} {said}"
        )

    def blame(self, operation: Operation) -> Blame:
        """Ask the ranks, within a bounded time, which of them keep ``operation`` from completing, and why."""
        awaited = self._awaited(operation)
        others = tuple(rank for rank in operation.lane.group.ranks if rank != self._rank)
        if self._clients is None or self._context.closed:
            return blame(awaited, {}, (), self._liveness.describe)
        lost: tuple[int, ...] = ()
        accounts: dict[int, Account] = {}
        with contextlib.suppress(OSError, RuntimeError):  # no file descriptors or store: report what is known
            if awaited.opens and self._context.store_answers():
                unprepared = self._context.backend.unprepared(operation.lane.group.ranks)
                awaited = replace(awaited, unprepared=unprepared)
                others = tuple(sorted({*others, *unprepared} - {self._rank}))
            accounts = self._liveness.accounts(others)
            lost = self._liveness.lost(tuple(accounts), routine=True)
        return blame(awaited, accounts, lost, self._liveness.describe, self._own_account())

    def _awaited(self, operation: Operation) -> Awaited:
        """Describe the call that the other ranks have to make to match ``operation``."""
        lane = operation.lane
        peer = lane.group.ranks[operation.peer] if operation.peer >= 0 else -1
        group, key = lane_id(lane.group.key, lane.key)
        return Awaited(
            operation.name,
            group,
            key,
            lane.name,
            operation.sequence,
            operation.part,
            peer,
            self._rank,
            operation.tag,
            lane.communicator is None,
            ticket=operation.ticket,
            prepares=f"new_group([{enumerated(lane.group.ranks)}]), as every rank has to",
        )

    def _own_account(self) -> Account:
        return Account(self._rank, read(self._context.recorder.buffer), host.monotonic())

    def look_for_ends(self, parts: Sequence[Operation]) -> None:
        """Refuse those ``parts`` of calls that another rank's call does not have and so will never make.

        Each rank is asked once for all parts together, since a silent rank delays every query.
        """
        members = {rank for part in parts for rank in part.lane.group.ranks} - {self._rank}
        accounts = self._liveness.accounts(tuple(sorted(members))) | {self._rank: self._own_account()}
        for part in parts:
            lane = cast("Lane", part.lane)
            own = {rank: accounts[rank] for rank in lane.group.ranks if rank in accounts}
            texts = ended_before(self._awaited(part), own)
            if texts:
                error = mismatch(lane, list(texts), list(texts.values()), place=part.sequence)
                self._context.refuse(lane, error, part.sequence, part=part.part)

    def tell_of_stall(self, operation: Operation) -> None:
        """Warn that a wait for ``operation`` has reached ``stall_seconds``, and name the ranks at fault.

        What the whole job waits for is reported only by the first rank that finds it.
        """
        found = self.blame(operation)
        why = str(found) if self._tells_first(found.verdict_key) else found.without_verdict
        warn(self._rank, operation, host.monotonic() - operation.started, why)

    def _tells_first(self, verdict: str) -> bool:
        """Claim the report of ``verdict``; returns False only if another rank is known to have claimed it."""
        if verdict and self._clients is not None and self._context.store_answers():
            with (
                contextlib.suppress(RuntimeError),
                self._clients.borrow() as store,
            ):  # the store may go with rank 0
                return store.add(f"asynccoll/told/{verdict}", 1) == 1
        return True

    def dump(self) -> str:
        """Save what the ranks have recorded. Returns text to append to an error; "" if nothing was saved."""
        now = host.monotonic()
        if self._clients is None or self._context.thread_rank or self._context.closed:
            return ""
        directory = dumps.directory_for(self._liveness.job())
        if directory is None:
            return ""
        if now - self._dumped >= DUMP_SECONDS:
            self._dumped = now
            self._kept = dumps.write_dumps(directory, self._liveness.recorded())
        return f" (asynccoll trace diff {directory} shows where the ranks diverge)" if self._kept else ""


def _refused_after(place: int, lane: Lane, flight: Flight | None) -> Call | None:
    """Return a rank's first call after ``place`` on the lane, if the rank refused that call."""
    calls = () if flight is None else flight.on_lane(*lane_id(lane.group.key, lane.key))
    after = next((call for call in calls if call.sequence > place), None)
    return after if after is not None and after.was_refused else None

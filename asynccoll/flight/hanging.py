"""Find the ranks that a hanging job waits for: one verdict, from all calls that are not over.

If ranks wait for each other in a circle, each call alone would blame another rank: rank 1, say, has skipped a
call in which ranks 0 and 2 wait, and now waits in its next call, which those two have not made. ``hang``
names the ranks of the smaller side, as these have taken another path, and shows the circle. If no side is
smaller (two ranks await two lanes in opposite order, or one of the two has skipped a call, which looks the
same), it names none. A rank that waits in a message is held up by the rank that has not called the other side
of it; ranks that all wait for each other's messages form a circle too. The functions are pure: they take
flights or recordings of the ranks, and the result does not depend on which rank asks.

``reason`` is the advice for a rank that has skipped a call that a helper of this library makes, chosen by the
lane's name. The rank that waits, the ranks that continue, and readers of the recordings all get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from asynccoll.flight.comparing import members, partings
from asynccoll.flight.messages import refused_side, unmet
from asynccoll.flight.reading import Call, Flight
from asynccoll.host.call_number import CHILD, call_name
from asynccoll.host.words import duration, listed, ranks_of

#: Part of the names of lanes on which the state of a sharded model or optimizer is gathered, on every rank.
FULL_STATE = "/full_state"
#: Part of the names of lanes on which backward sends: see ``ops.scopes.backward_lane``.
OF_BACKWARD = "/backward"
_ON_EVERY_RANK = (
    "the whole state is gathered from all ranks: call full_state_dict() (or full_optimizer_state()) on every "
    "rank, and only save what it returns under `if rank == 0`"
)


def advice(lanes: Iterable[str]) -> str:
    """Say what to do about missing calls on one of these lanes; "" if the names give no hint."""
    return _ON_EVERY_RANK if any(FULL_STATE in lane for lane in lanes) else ""


def reason(lane: str) -> str:
    """Say why a rank may have made no call on this lane, and what to do about it."""
    if told := advice([lane]):
        return told
    if OF_BACKWARD in lane:
        return (
            "backward() makes the calls there: run it on every rank, on inputs that require grad on all "
            "or on none"
        )
    return "every rank has to make each call (is this one under `if rank == 0`?)"


#: A wait that timed out less than this ago still counts as a wait, as its error may be about to be reported;
#: and a call made within this time after a timeout may have been made only because of that.
LATELY_SECONDS = 0.5
_SAME_ORDER = "await lanes in the same order on every rank, and never skip a call, here or in an earlier step"
_WITHOUT_DATA = "a rank without data for a step still has to await the gradients (or optimizer.step())"
#: How many waits of a circle are shown at most.
_MOST_TURNS = 8

_START_FIRST = (
    "start all sends and receives before you await any of them (`sent = ac.send(...)`, `await ac.recv(...)`, "
    "`await sent`, or ac.batch_isend_irecv of both)"
)
_CLOSED = (
    "some of them have closed and reopened this lane, and others have not: call ac.close_lane(name) "
    "on every rank, between the same calls"
)
_CHILDREN = (
    "some of them have started more child tasks of that name than others: start the same number on every "
    "rank, including those that call in another group, or make no calls"
)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation that was not over at the end, or failed; ``missing``: ranks that had not called it.

    For a message, whose ``sequence`` is 0, ``operation`` is the other side: ``send to rank 1 (tag 0)``, and
    ``ticket`` the number of its record, which distinguishes it from the rank's others. ``started_early``: no
    waiter is known to have waited for it.
    """

    rank: int
    operation: str
    lane: str
    sequence: int
    place: str
    seconds: float
    failed: bool
    missing: tuple[int, ...]
    started_early: bool = False
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One wait of a circle: the call in which the ranks ``waiting`` wait for ``ranks``.

    ``ticket``: as in ``Unfinished``.
    """

    waiting: tuple[int, ...]
    operation: str
    lane: str
    sequence: int
    place: str
    ranks: tuple[int, ...]
    ticket: int = 0

    @property
    def what(self) -> str:
        """``in all_reduce #1 on lane 'a' (train.py:7) for rank 1``; for a message, what rank 1 must call."""
        if not self.sequence:
            return f"at {self.place} for {listed(self.ranks)} to call {self.operation}"
        call = call_name(self.operation, self.sequence)
        return f"in {call} on lane {self.lane!r} ({self.place}) for {listed(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Hang:
    """``ranks`` have not made a call in which ``waiting`` wait, the first of them for ``seconds``.

    ``refused``: how ``ranks`` refused the call; "" if they have not called it. ``circle``: if ``ranks`` wait
    themselves, the waits that form the circle, beginning with that of ``waiting``. ``ranks`` is empty if none
    of the circle's ranks stand out. ``ticket``: as in ``Unfinished``.
    """

    ranks: tuple[int, ...]
    operation: str
    lane: str
    sequence: int
    place: str
    waiting: tuple[int, ...]
    seconds: float
    failed: bool
    refused: str = ""
    circle: tuple[Turn, ...] = ()
    ticket: int = 0

    def __str__(self) -> str:
        if not self.ranks:
            return self._around()
        waits = "waited" if self.failed else f"{_has(self.waiting)} waited"
        call = f"{call_name(self.operation, self.sequence)} on lane {self.lane!r}"
        waiting = f"which {listed(self.waiting)} {waits} {duration(self.seconds)} ({self.place})"
        waiting = f"{'in' if self.sequence else 'for'} {waiting}"
        if self.refused:
            return f"{listed(self.ranks)} refused {call}, {waiting}: {self.refused}"
        verdict = f"{listed(self.ranks)} {_has(self.ranks)} not called {call}, {waiting}"
        own = [turn for turn in self.circle if not set(self.ranks).isdisjoint(turn.waiting)]
        if not own:
            return verdict
        return f"{verdict}, but {_waits(self.ranks)} {own[0].what}: {self._advice()}"

    def _around(self) -> str:
        first, *others = self.circle
        wait = "ranks wait in a circle" if first.sequence else self._crossed()
        turns = [f"{listed(first.waiting)} {_waits(first.waiting)} {first.what}"]
        turns += [f"{listed(one.waiting)} {one.what}" for one in others[: _MOST_TURNS - 1]]
        if len(self.circle) > _MOST_TURNS:
            turns.append(f"so on in {len(self.circle) - _MOST_TURNS} more waits")
        return f"{wait}: {', and '.join(turns)}, for {duration(self.seconds)}: {self._advice()}"

    def _crossed(self) -> str:
        """Say what the ranks of a circle of messages wait for."""
        ranks = sorted({rank for turn in self.circle for rank in turn.waiting})
        other, none = ("the other", "neither") if len(ranks) == 2 else ("another", "none")
        missing = {turn.operation[:4] for turn in self.circle}
        if missing == {"send"}:
            return f"{listed(ranks)} each wait for a message from {other}, and {none} has sent one"
        if missing == {"recv"}:
            return f"{listed(ranks)} each wait for {other} to receive a message, and {none} does"
        return f"{listed(ranks)} each wait for {other} to send or receive a message"

    def _advice(self) -> str:
        """Say what to do about the circle.

        Calls on one lane cannot form a circle, as a rank at a later call has made the earlier ones. So if all
        lanes have one name, the ranks have closed and opened that lane differently, themselves or by ending
        child tasks. Messages have no common order.
        """
        if not self.sequence:
            return _START_FIRST
        lanes = {turn.lane for turn in self.circle}
        if len(lanes) == 1:
            children = {turn.sequence // CHILD for turn in self.circle}
            return _CLOSED if len(children) == 1 else _CHILDREN
        return advice(lanes) or self._of_backward() or _SAME_ORDER

    def _of_backward(self) -> str:
        """Say what may have happened if some ranks wait for gradients, and others in another call; else "".

        The calls alone do not show whether the former have skipped the other call, or the latter a step.
        """
        sending = next((turn for turn in self.circle if OF_BACKWARD in turn.lane), None)
        other = next((turn for turn in self.circle if OF_BACKWARD not in turn.lane), None)
        if sending is None or other is None:
            return ""
        call = f"{call_name(other.operation, other.sequence)} on lane {other.lane!r}"
        return (
            f"either {listed(other.ranks)} skipped {call}, as under an `if` that is not true on every rank, "
            f"or {listed(sending.ranks)} had fewer batches, or inputs that do not require grad: never "
            f"skip a call; {_WITHOUT_DATA}"
        )

    @property
    def key(self) -> str:
        """A name for the wait that does not depend on which rank asks, nor on when."""
        waits = self.circle or (self,)
        return ", ".join(
            sorted(
                f"{one.operation} #{one.sequence or f'{one.waiting[0]}-{one.ticket}'} {one.lane}"
                for one in waits
            )
        )


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _waits(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def hang(unfinished: Iterable[Unfinished]) -> Hang | None:
    """Return the ranks that hold up the job; None if every rank has made each call in which others wait."""
    waits = [one for one in unfinished if one.missing]
    if not waits:
        return None
    waiting = {one.rank for one in waits}
    # Waits for ranks that do not wait themselves: those ranks hold up the rest.
    free = [one for one in waits if waiting.isdisjoint(one.missing)]
    if not free and not all(one.sequence for one in waits):
        # A message may have been started early, with no waiter, so first look for a circle without messages.
        return hang(one for one in waits if one.sequence) or _crossed(waits)
    circle = [] if free else _circle(min(waits, key=_fewest), waits)
    # In a circle every rank waits: there the ranks of the smaller side have taken another path.
    first = min(free or circle, key=_fewest)
    stands_out = free or len({len(one.missing) for one in circle}) > 1
    at = circle.index(first) if circle else 0
    turns = _turns([first, *circle[at + 1 :], *circle[:at]], waits)
    return Hang(
        first.missing if stands_out else (), first.operation, first.lane, first.sequence, first.place,
        turns[0].waiting, first.seconds, first.failed, circle=turns if circle else (), ticket=first.ticket,
    )  # fmt: skip


def _crossed(waits: Sequence[Unfinished]) -> Hang | None:
    """Return the circle in which ranks wait for each other's messages, if there is one.

    A circle of one send and one receive does not count: the two differ only in tag or lane.
    """
    waits = [one for one in waits if not one.sequence and not one.started_early]
    waiting = {one.rank for one in waits}
    if not waits or any(waiting.isdisjoint(one.missing) for one in waits):
        return None
    circle = _circle(waits[0], waits)
    first = circle[0]
    if len(circle) == 2 and len({one.operation[:4] for one in circle}) > 1:
        return None
    return Hang(
        (), first.operation, first.lane, 0, first.place, (first.rank,), first.seconds, False,
        circle=_turns(circle, circle), ticket=first.ticket,
    )  # fmt: skip


def _fewest(one: Unfinished) -> tuple[bool, int, float]:
    """Sort key: fewest missing ranks first; messages last, as one that started early may have no waiter."""
    return not one.sequence, len(one.missing), -one.seconds


def _circle(start: Unfinished, waits: Sequence[Unfinished]) -> list[Unfinished]:
    """Follow the waits from ``start`` until a rank comes up again; return the waits of that circle."""
    longest: dict[int, Unfinished] = {}  # by rank, its wait that has lasted longest (the first of equal ones)
    for one in sorted(waits, key=lambda one: -one.seconds):
        longest.setdefault(one.rank, one)
    chain, passed = [start], {start.rank: 0}
    while True:
        # Among the ranks that hold up the last one, take the wait that has lasted longest.
        missing = set(chain[-1].missing)
        latest = next(one for rank, one in longest.items() if rank in missing)
        if begins := [passed[rank] for rank in latest.missing if rank in passed]:
            return [*chain[min(begins) :], latest]
        passed.setdefault(latest.rank, len(chain))
        chain.append(latest)


def _turns(circle: Sequence[Unfinished], waits: Iterable[Unfinished]) -> tuple[Turn, ...]:
    waiting: dict[tuple[str, str, int], set[int]] = {}
    for one in waits:
        waiting.setdefault((one.operation, one.lane, one.sequence), set()).add(one.rank)
    return tuple(
        Turn(
            tuple(sorted(waiting[one.operation, one.lane, one.sequence])), one.operation, one.lane,
            one.sequence, one.place, one.missing, one.ticket,
        )
        for one in circle
    )  # fmt: skip


def hang_of(flights: Mapping[int, Flight], now: Mapping[int, float] | None = None) -> Hang | None:
    """Apply ``hang`` to what the ranks have recorded, by rank; ``now`` is the monotonic clock of each.

    Without ``now`` it is the time of the last event that any rank has recorded. Also None if ranks wait in
    different calls at one place: then no rank waits for one that has not called.
    """
    for parting in partings(flights):
        made = [call for call in parting.calls.values() if call is not None and not call.was_refused]
        if parting.kind == "different" and any(call.state != "finished" for call in made):
            return None
    moments = _moments(flights) if now is None else now
    live = now is not None
    unfinished = list(_unfinished(flights, moments, live=live))
    found = hang([*(one for one, _ in unfinished), *_messages(flights, moments, live=live)])
    if found is None:
        return None
    refused = [(one, why) for one, why in unfinished if why]
    if found.circle and refused:  # ranks that refused a call are the ones that took another path
        found = hang(one for one, _ in refused) or found
    at = found.ranks, found.lane, found.sequence
    told = (why for one, why in refused if (one.missing, one.lane, one.sequence) == at)
    return replace(found, refused=next(told, ""))


def _moments(flights: Mapping[int, Flight]) -> dict[int, float]:
    """Return the time of the last event that any rank has recorded, by each rank's own clock."""
    walls = {rank: one.wall - one.began for rank, one in flights.items()}
    latest = max((_latest(one) + walls[rank] for rank, one in flights.items()), default=0.0)
    return {rank: latest - wall for rank, wall in walls.items()}


def _latest(one: Flight) -> float:
    return max((one.ended, *(max(call.called, call.ended) for call in one.calls)))


def _unfinished(
    flights: Mapping[int, Flight], now: Mapping[int, float], *, live: bool
) -> Iterator[tuple[Unfinished, str]]:
    """Yield the calls in which ranks wait, and how the missing ranks refused them, if all did; else "".

    Many ranks wait in one call, so each call is looked up in all flights only once.
    """
    sides = cache(partial(_missing, cache(partial(members, flights))))
    for rank, one in flights.items():
        for call in _waited_for(one, now[rank] if live and one.ending == "running" else None):
            end = call.ended if call.failure else now[rank]
            missing, why = sides(call.operation, call.group, call.lane_key, call.sequence, call.part)
            told = Unfinished(
                rank, call.operation, _lane(call), call.sequence, call.place, max(0.0, end - call.called),
                bool(call.failure), missing,
            )  # fmt: skip
            yield told, why


def _waited_for(one: Flight, now: float | None) -> list[Call]:
    """Return the calls that a rank waits for, or that have failed, and those before them on their lanes.

    ``now`` is the rank's clock if it is still running: then it does not wait for its other calls. Otherwise
    (None) those count too if it waits for none, as its last moments may be missing from the record.
    """
    latest = max((call.called for call in one.calls), default=0.0)
    unfinished = [
        call
        for call in one.calls
        if call.sequence
        and call.state not in ("finished", "refused")
        and not (call.failure and latest > call.ended)  # the program has handled that failure
    ]
    since = latest if now is None else now - LATELY_SECONDS
    last: dict[tuple[str, str], int] = {}
    for call in unfinished:
        if call.failure or call.is_waited_for(since):
            last[call.group, call.lane_key] = max(call.sequence, last.get((call.group, call.lane_key), 0))
    if now is None and not last:
        return [call for call in unfinished if not call.waited]
    return [call for call in unfinished if call.sequence <= last.get((call.group, call.lane_key), 0)]


def _messages(flights: Mapping[int, Flight], now: Mapping[int, float], *, live: bool) -> Iterator[Unfinished]:
    """Yield each rank's last call if it is a message whose other side was neither called nor refused."""
    for one in unmet(flights):
        rank, peer, call = one.rank, one.peer, one.call
        about = (call.group, call.lane_key, call.operation, rank, call.part)
        if live and flights[rank].ending == "running" and not call.is_waited_for(now[rank] - LATELY_SECONDS):
            continue
        if call is flights[rank].calls[-1] and refused_side(flights[peer], *about) is None:
            seconds = max(0.0, now[rank] - call.called)
            yield Unfinished(
                rank, one.missing, _lane(call), 0, call.place, seconds, False, (peer,),
                started_early=not (call.waited > 0 or call.timed_out or call.polled), ticket=call.ticket,
            )  # fmt: skip


def _lane(call: Call) -> str:
    return call.lane if call.group == "world" else f"{call.lane} of [{ranks_of(call.group)}]"


def _missing(
    members_of: Callable[[str], Mapping[int, Flight]],
    operation: str,
    group: str,
    lane_key: str,
    sequence: int,
    part: int,
) -> tuple[tuple[int, ...], str]:
    """Return the ranks of the group that have not reached the call on its lane, or have refused it.

    Also how the first of them refused it, if all of them did; else "".
    """
    sides = {
        rank: refused
        for rank, one in members_of(group).items()
        if (refused := one.refused(group, lane_key, sequence, part)) is not None
        or one.reached(group, lane_key) < sequence
    }
    first = next(iter(sides.values()), None)
    return tuple(sides), first.refusal(operation) if first is not None and all(sides.values()) else ""

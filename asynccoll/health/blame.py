"""Explain in words which ranks keep an operation from completing, and what they are doing instead.

The functions are pure: they take the ranks' accounts (``accounts`` asks the ranks). A rank is named only on
evidence from its flight recorder or its kernel.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from asynccoll.flight import (
    END,
    LATELY_SECONDS,
    Call,
    Flight,
    abandoned,
    advice,
    hang_of,
    is_answered,
    latest_side,
    refused_send,
    refused_side,
    strayed,
    unmet,
)
from asynccoll.health.accounts import Account
from asynccoll.host.call_number import call_name, counterpart, message_name
from asynccoll.host.endings import in_words
from asynccoll.host.words import lane_name, listed

#: An error has sentences for at most this many ranks; ``asynccoll where`` shows all.
_MOST_TOLD = 8
_SILENT = {
    True: "does not answer, though its host does",
    False: "cannot be reached: the network in between is slow or down",
}
_NOT_OPEN = "its lane is not open yet: a member of the group has made no call on it"
_OUT_OF_MEMORY = " (if it ran out of memory, dmesg says so)"
_MAYBE = "this may follow from another wait: "
_STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger); continue it with kill -CONT",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel (disk I/O, or swapping)",
    "Z": "its process has ended",
    "": "its process is gone",
}


@dataclass(frozen=True, slots=True)
class Awaited:
    """An operation that is waited for; ``str()`` says what the other ranks have to call.

    ``peer`` is the global rank that a message of ``rank`` is to or from, with ``tag``; else -1.
    ``opens``: its lane is not open yet; every rank of the group has to make a call on it first, even for a
    message. ``unprepared``: the ranks, possibly outside the group, that have to call ``prepares`` first.
    ``ticket``: the number of the operation's record.
    """

    operation: str
    group: str
    lane_key: str
    lane: str
    sequence: int
    part: int = 1
    peer: int = -1
    rank: int = -1
    tag: int = 0
    opens: bool = False
    unprepared: tuple[int, ...] = ()
    prepares: str = ""
    ticket: int = -1

    def __str__(self) -> str:
        if self.peer >= 0:
            other = counterpart(self.operation) or self.operation
            return f"{message_name(other, self.rank, self.tag)} on {lane_name(self.lane, self.group)}"
        return f"{call_name(self.operation, self.sequence)} on {lane_name(self.lane, self.group)}"


@dataclass(frozen=True, slots=True)
class Blame:
    """The ``ranks`` that an operation waits for (global, in order), and for each a sentence that says why.

    If there are no ranks, ``sentences`` say what else is known. ``str()`` joins the sentences. ``verdict`` is
    the one of them, if any, that says what the whole job waits for; ``verdict_key`` is a name for it that is
    the same on all ranks.
    """

    operation: str
    lane: str
    ranks: tuple[int, ...]
    sentences: tuple[str, ...]
    verdict: str = ""
    verdict_key: str = ""

    def __str__(self) -> str:
        return "; ".join(self.sentences)

    @property
    def without_verdict(self) -> str:
        """``str()`` without the verdict, for a rank one of whose peers has reported it already."""
        own = [one for one in self.sentences if one != self.verdict]
        return "; ".join([*own, "another rank's warning says what the whole job waits for"])


def blame(
    awaited: Awaited,
    accounts: Mapping[int, Account],
    lost: Sequence[int],
    describe: Callable[[int], str],
    own: Account | None = None,
) -> Blame:
    """Find the ranks of ``accounts`` that have not made the call, or cannot continue; ``lost`` are gone.

    ``describe`` returns a rank's name: ``rank 1 (host n1, pid 71)``. ``own`` is the account of the rank that
    asks, which may itself have skipped a call in which the others wait.
    """
    found: dict[int, str] = {}
    for rank, account in sorted(accounts.items()):
        if rank in awaited.unprepared:
            why = _unprepared(awaited, account, rank in lost)
        elif awaited.peer in (-1, rank):
            why = _why(awaited, account, rank in lost)
        else:
            why = _unopened(awaited, account)
        if why:
            missed = _missed(awaited, account, own) if rank == awaited.peer and own is not None else []
            found[rank] = "; ".join([f"{describe(rank)} {why}", *missed])
    sentences = [*found.values()][:_MOST_TOLD]
    if len(found) > _MOST_TOLD:
        sentences.append(f"and likewise for {len(found) - _MOST_TOLD} more ranks")
    told = advice([awaited.lane])
    origin, key = "", ""
    if not found:
        sentences = _nobody(awaited, accounts, own)
    elif own is not None and (verdict := _origin(tuple(found), [own, *accounts.values()])):
        # A circle explains the wait, so it goes first; another wait only may explain it, so it goes last.
        origin, key = verdict
        sentences.insert(len(sentences) if origin.startswith(_MAYBE) else 0, origin)
    elif told or (told := _strayed(awaited, found, accounts, own)):
        sentences.append(told)
    return Blame(awaited.operation, awaited.lane, tuple(found), tuple(sentences), origin, key)


def _missed(awaited: Awaited, account: Account, own: Account) -> list[str]:
    """Say which of the two ranks' other messages may explain that these two have not met."""
    if own.flight is None or account.flight is None:
        return []
    side = counterpart(awaited.operation)[:4]
    told = [
        f"rank {one.rank} called {one.call.name} at {one.call.place}, for which this rank has not called "
        f"{one.missing}; tags, lanes and order have to agree"
        for one in unmet({own.rank: own.flight, account.rank: account.flight})
        if one.rank == account.rank and one.call.operation.startswith(side)
    ][:1]
    about = awaited.group, awaited.lane_key, awaited.operation, awaited.peer, awaited.tag, awaited.ticket
    if (before := abandoned(own.flight, *about, own.now - LATELY_SECONDS)) is not None:
        how = "has taken the last message" if before.ended else "takes a message first"
        told.append(
            f"this rank's {before.operation} at {before.place}, which nobody waits for any more, {how}"
        )
    return told


def _strayed(
    awaited: Awaited, found: Collection[int], accounts: Mapping[int, Account], own: Account | None
) -> str:
    """Say, with the lines, that one of ``found`` has likely skipped an identical call before; else "".

    "" also if the very first calls came from different lines: then the ranks run different code.
    """
    known = [own, *(accounts[rank] for rank in found)]
    flights = {one.rank: one.flight for one in known if one is not None and one.flight is not None}
    where = strayed(flights, awaited.group, awaited.lane_key) if awaited.sequence and own else None
    return where.hint if where and where.comes_late else ""


def _origin(ranks: tuple[int, ...], accounts: Sequence[Account]) -> tuple[str, str] | None:
    """Say which ranks the whole job waits for, or the circle in which ranks wait; and the wait's key.

    None if these are ``ranks`` themselves, or if it is unknown. ``accounts`` begins with that of the rank
    that asks.
    """
    flights = {one.rank: one.flight for one in accounts if one.flight is not None and one.now}
    if len(flights) < len(accounts):
        return None
    found = hang_of(flights, {one.rank: one.now for one in accounts})
    if found is None or found.ranks == ranks:
        return None
    if ranks and accounts[0].rank in found.ranks and not found.circle:  # a consequence of this rank's wait
        return None
    if not found.ranks and any(accounts[0].rank in turn.waiting for turn in found.circle):
        return str(found), found.key
    return f"{_MAYBE}{found}", found.key


def _why(awaited: Awaited, account: Account, lost: bool) -> str:
    """Say why this rank has not done its part in the operation, or cannot; "" if nothing suggests that."""
    flight = account.flight
    gone = lost or (account.near and account.state in ("", "Z"))
    if flight is None:
        return "is gone" if gone else "" if account.answers else _SILENT[account.reached]
    if (refused := _refused(awaited, flight)) is not None:
        return f"{refused.refusal(awaited.operation)}; {_now(account, gone)}".removesuffix("; ")
    has_called = _has_called(awaited, flight)
    stuck = account.near and account.state in _STATES and account.state != "D"
    if has_called:
        # A rank that left its world properly has done its part.
        ended = (gone and flight.ending == "running") or _has_failed(flight)
        return f"has called it; {_now(account, gone)}" if stuck or ended else _other(awaited, flight)
    unheard = gone and flight.ending == "running"
    said = "is gone without having called it" if unheard else f"has not called {awaited}"
    last = last_words(flight, account.now)
    if (failed := _failed(awaited, flight)) is not None:
        said += f" again, after its {failed.operation} at {failed.place} failed: {failed.failure}"
        last = "" if failed is flight.calls[-1] else last
    return "; ".join(filter(None, [said, last, _now(account, gone)]))


def _unprepared(awaited: Awaited, account: Account, lost: bool) -> str:
    """Say that this rank has not prepared the group, which is known whether or not the rank answers."""
    gone = lost or (account.near and account.state in ("", "Z"))
    last = "" if account.flight is None else last_words(account.flight, account.now)
    return "; ".join(filter(None, [f"has not called {awaited.prepares}", last, _now(account, gone)]))


def _unopened(awaited: Awaited, account: Account) -> str:
    """Say that a third rank holds up a message, as it has not used the message's lane yet; else ""."""
    flight = account.flight
    if not awaited.opens or flight is None or any(flight.on_lane(awaited.group, awaited.lane_key)):
        return ""
    lane = lane_name(awaited.lane, awaited.group)
    return (
        f"has made no call on {lane}, which opens once every rank of the group has used it: use the default "
        "lane, or a group of just the sender and the receiver"
    )


def _has_called(awaited: Awaited, flight: Flight) -> bool:
    if not awaited.sequence:  # messages are not numbered
        return is_answered(
            flight, awaited.group, awaited.lane_key, awaited.operation, awaited.rank, awaited.tag
        )
    if flight.reached(awaited.group, awaited.lane_key) < awaited.sequence:
        return False
    parts = [
        call.part
        for call in flight.on_lane(awaited.group, awaited.lane_key)
        if call.sequence == awaited.sequence
    ]
    return not parts or max(parts) >= awaited.part  # if there are none, their records were overwritten


def _refused(awaited: Awaited, flight: Flight) -> Call | None:
    """Return the rank's side of the operation, if the rank has refused it; else None."""
    if awaited.sequence:
        return flight.refused(awaited.group, awaited.lane_key, awaited.sequence, awaited.part)
    if _has_called(awaited, flight):
        return None
    return refused_side(flight, awaited.group, awaited.lane_key, awaited.operation, awaited.rank, awaited.tag)


def _failed(awaited: Awaited, flight: Flight) -> Call | None:
    """Return the rank's latest side of such a message, if that has failed; else None."""
    if awaited.sequence:
        return None
    side = latest_side(flight, awaited.group, awaited.lane_key, awaited.operation, awaited.rank, awaited.tag)
    return side if side is not None and side.failure else None


def _other(awaited: Awaited, flight: Flight) -> str:
    """Say what the rank called in place of the operation, if that is known to be a different one; else ""."""
    call = _in_its_place(awaited, flight)
    if call is None or call.operation == awaited.operation:
        return ""
    return f"has called {f'{call.operation} {call.of}'.rstrip()} instead, at {call.place}"


def _in_its_place(awaited: Awaited, flight: Flight) -> Call | None:
    for call in flight.on_lane(awaited.group, awaited.lane_key):
        if 0 < call.sequence == awaited.sequence and call.part == awaited.part:
            return call
    return None


def ended_before(awaited: Awaited, accounts: Mapping[int, Account]) -> dict[int, str]:
    """Return what each rank called as that part, if one rank's call has ended before that part; else {}."""
    found: dict[int, Call] = {}
    for rank, account in sorted(accounts.items()):
        if account.flight is not None and (call := _in_its_place(awaited, account.flight)) is not None:
            found[rank] = call
    over = any(call.operation == END for call in found.values())
    return {rank: call.told for rank, call in found.items()} if over else {}


def last_words(flight: Flight, now: float, since: str = "ago") -> str:
    """Describe the last call: ``its last call was broadcast #40 on lane 'eval' at train.py:88, ...``."""
    if not flight.calls:
        return "it has made no calls"
    last = flight.calls[-1]
    ago = f", {max(0.0, now - last.called):.1f} s {since}" if now else ""
    why = f": {last.failure}" if last.was_refused else ""
    text = f"its last call was {last.name} at {last.place}{ago}, {last.state}{why}"
    lately = now - LATELY_SECONDS if now else math.inf
    open_ones = (call for call in flight.calls[:-1] if call.is_open)
    waits = next((call for call in open_ones if call.waited > 0 or call.polled >= lately), None)
    return f"{text}; waiting in {waits.name} at {waits.place}" if waits is not None else text


def _has_failed(flight: Flight) -> bool:
    return "why" in flight.said or (flight.ending == "exited" and flight.code != 0)


def ending(flight: Flight, now: float, *, advice: bool = True) -> str:
    """Say how a rank ended: ``it ended with exit code 0, 3.0 s ago``; "" if it is not known to have ended.

    ``advice``: also say where to look for the reason.
    """
    ago = f", {max(0.0, now - flight.ended):.1f} s ago" if now and flight.ended else ""
    if flight.ending == "running":
        return ""
    why = flight.said.get("why", "")
    if flight.ending == "finalized":
        return f"it left its world (finalize{', on ' * bool(why)}{why}){ago}"
    code = "" if flight.code is None else in_words(flight.code)
    if flight.code is not None and flight.code < 0:
        look = _OUT_OF_MEMORY if advice and flight.code == -signal.SIGKILL else ""
        return f"its process was {code}{ago}{look}"
    if why:
        return f"it ended with {why}{f' ({code})' if code else ''}{ago}"
    if code:
        return f"it ended with {code}{ago}"
    return f"its {'process has' if flight.ending == 'exited' else 'program'} ended{ago}"


def _now(account: Account, gone: bool) -> str:
    """Say what the rank is doing now; "" if nothing is known."""
    flight = account.flight
    if flight is not None and flight.ending != "running":
        return ending(flight, account.now)
    if gone and account.state not in ("Z", ""):
        return "its process is gone"
    # If the process answers, it was in the kernel only for a moment: state D means nothing then.
    if account.near and account.state in _STATES and not (account.state == "D" and account.stands):
        return _STATES[account.state]
    if account.stands:
        return f"it is now in {account.stands}"
    if not account.answers:
        return "it does not answer: native code may be holding its interpreter"
    return ""


def _nobody(awaited: Awaited, accounts: Mapping[int, Account], own: Account | None) -> list[str]:
    """Return the sentences for when every rank has called the operation, as far as is known."""
    if not accounts:
        return [_NOT_OPEN] if awaited.opens else []
    over = [rank for rank, one in sorted(accounts.items()) if one.flight and _is_over(awaited, one.flight)]
    if over:
        return [f"every rank has called it, and it has completed on {listed(over)}"]
    who = "every rank has" if awaited.peer < 0 else "both ranks have"
    late = _lately(awaited, accounts)
    told = [f"rank {rank} {age}{_after(before)}" for rank, (age, before) in late.items()]
    said = ", ".join([f"{who} called it", *told[:_MOST_TOLD]])
    if (refused := _refused_before(awaited, own)) is not None:
        counts = f"this rank's {refused.operation} at {refused.place} was refused, which counts as a message"
        peer = f"rank {awaited.peer}"
        return [
            said,
            f"{counts}: a recv of {peer} may have failed with that refusal; {peer} then has to call it again",
        ]
    if not any(before for _, before in late.values()):
        return [f"{said}: the operation is slow, or stuck in the network"]
    verdict = None if own is None else _origin((), [own, *accounts.values()])
    return [said, verdict[0]] if verdict else [said]


def _refused_before(awaited: Awaited, own: Account | None) -> Call | None:
    """Return this rank's send that was refused, if it now waits for another one to the same rank."""
    if own is None or own.flight is None or awaited.sequence:
        return None
    return refused_send(
        own.flight, awaited.group, awaited.lane_key, awaited.operation, awaited.peer, awaited.tag
    )


def _lately(awaited: Awaited, accounts: Mapping[int, Account]) -> dict[int, tuple[str, Call | None]]:
    """Return the ranks that have only just called it: how long ago, and which call timed out just before."""
    late = {}
    for rank, one in sorted(accounts.items()):
        call = None if one.flight is None or not one.now else _call_of(awaited, one.flight)
        if one.flight is not None and call is not None and one.now - call.called < LATELY_SECONDS:
            age = max(0.0, one.now - call.called)
            late[rank] = f"{age:.1f} s ago", _timed_out_before(call, one.flight)
    return late


def _call_of(awaited: Awaited, flight: Flight) -> Call | None:
    """Return the rank's call at the place of ``awaited``; None for a message, which has no place."""
    calls = flight.on_lane(awaited.group, awaited.lane_key) if awaited.sequence else ()
    return next((call for call in calls if call.sequence == awaited.sequence), None)


def _timed_out_before(called: Call, flight: Flight) -> Call | None:
    """Return a call for which the rank's wait timed out just before it made ``called``, or None."""
    for call in flight.calls:
        if call.timed_out and 0 <= called.called - call.timed_out < LATELY_SECONDS:
            return call
    return None


def _after(before: Call | None) -> str:
    return "" if before is None else f", after its wait for {before.name} at {before.place} had timed out"


def _is_over(awaited: Awaited, flight: Flight) -> bool:
    calls: list[Call] = [
        call
        for call in flight.on_lane(awaited.group, awaited.lane_key)
        if call.sequence == awaited.sequence and awaited.sequence
    ]
    return bool(calls) and all(call.state == "finished" for call in calls)

"""Recorded point-to-point messages: between which ranks they are, and which ones have no other side.

The functions are pure. A message has no place in the order of its lane; ``part`` of its record is its tag.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache

from asynccoll.flight.reading import Call, Flight
from asynccoll.host.call_number import counterpart, message_name


@dataclass(frozen=True, slots=True)
class Unmet:
    """A message of ``rank`` that was in flight while rank ``peer`` had not called its own side."""

    rank: int
    peer: int
    call: Call

    @property
    def missing(self) -> str:
        """What ``peer`` has not called: ``recv from rank 0 (tag 0)``."""
        return message_name(counterpart(self.call.operation), self.rank, self.call.part)

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON values, for programs."""
        return {
            "rank": self.rank,
            "peer": self.peer,
            "group": self.call.group,
            "lane": self.call.lane,
            "called": self.call.title,
            "place": self.call.place,
            "missing": self.missing,
        }

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waits in {self.call.name} at {self.call.place}: "
            f"rank {self.peer} has not called {self.missing}"
        )


def unmet(flights: Mapping[int, Flight]) -> list[Unmet]:
    """Return the messages in flight, among the ranks of ``flights``, whose other side was not called."""
    found = [
        Unmet(rank, call.peer_rank, call)
        for rank, one in sorted(flights.items())
        for call in one.calls
        if call.is_open and call.peer_rank in flights and counterpart(call.operation)
    ]
    sides = cache(lambda rank: _open_sides(flights[rank]))
    return [
        one
        for one in found
        if not _is_among(
            sides(one.peer),
            (one.call.group, one.call.lane_key),
            one.call.operation,
            one.rank,
            one.call.part,
        )
    ]


def latest_side(
    flight: Flight, group: str, lane_key: str, operation: str, rank: int, tag: int
) -> Call | None:
    """Return the latest call that is the other side of ``operation`` on ``rank``, whatever its outcome."""
    return next(reversed(_messages(flight, group, lane_key, counterpart(operation), rank, tag)), None)


def refused_side(
    flight: Flight, group: str, lane_key: str, operation: str, rank: int, tag: int
) -> Call | None:
    """Return ``latest_side`` if it was refused, else None."""
    latest = latest_side(flight, group, lane_key, operation, rank, tag)
    return latest if latest is not None and latest.was_refused else None


def refused_send(
    flight: Flight, group: str, lane_key: str, operation: str, rank: int, tag: int
) -> Call | None:
    """Return the latest send to ``rank`` that was refused, if ``operation`` is a send.

    It counts as a message. None if a later send is over: then the refusal has arrived before it.
    """
    if not operation.startswith("send"):
        return None
    sends = _messages(flight, group, lane_key, operation, rank, tag)
    latest = next((call for call in reversed(sends) if not call.is_open), None)
    return latest if latest is not None and latest.was_refused else None


def abandoned(
    flight: Flight,
    group: str,
    lane_key: str,
    operation: str,
    rank: int,
    tag: int,
    ticket: int,
    since: float,
) -> Call | None:
    """Return a receive before ``ticket`` that comes first although nobody waits for it any more, or None.

    It has taken the last message from ``rank``, or is the next to take one. One that was polled at or after
    ``since`` is waited for.
    """
    if not operation.startswith("recv"):
        return None
    receives = _messages(flight, group, lane_key, operation, rank, tag)
    before = [call for call in receives if call.ticket < ticket and not call.failure]
    latest = next((call for call in reversed(before) if call.ended), None)
    open_ones = (call for call in before if call.is_open and call.waited <= 0 and call.polled < since)
    return next(open_ones, latest if latest is not None and latest.waited < 0 else None)


def _messages(flight: Flight, group: str, lane_key: str, operation: str, rank: int, tag: int) -> list[Call]:
    """Return the messages on a lane to or from ``rank``, in the direction of ``operation``."""
    return [
        call
        for call in flight.on_lane(group, lane_key)
        if (call.sequence, call.peer_rank, call.part) == (0, rank, tag)
        and call.operation[:4] == operation[:4]
    ]


def is_answered(flight: Flight, group: str, lane_key: str, operation: str, rank: int, tag: int) -> bool:
    """Whether ``flight`` has a call in flight that is the other side of ``operation`` on ``rank``."""
    return _is_among(_open_sides(flight), (group, lane_key), operation, rank, tag)


_Lane = tuple[str, str]
_Side = tuple[_Lane, str, int, int]


def _open_sides(flight: Flight) -> set[_Side]:
    """Return the messages in flight: lane, the operation's first letters, the other rank, and tag."""
    return {
        ((call.group, call.lane_key), call.operation[:4], call.peer_rank, call.part)
        for call in flight.calls
        if not call.sequence and call.is_open
    }


def _is_among(sides: Container[_Side], lane: _Lane, operation: str, rank: int, tag: int) -> bool:
    """Whether the other side of ``operation`` on ``rank`` is one of ``sides``."""
    role = counterpart(operation)[:4]
    # -1: the peer is unknown as the group's name was cut, so it may be ``rank``
    return any((lane, role, peer, tag) in sides for peer in (rank, -1))

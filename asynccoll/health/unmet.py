"""Calls that a rank will never make and its peers wait for, as only code on top of the operations can know.

Such code registers a ``Party`` here. Nothing is sent until a rank has waited for a second, for whatever.
Then its watch writes into the store what the party says it is waiting for (one key per party and rank, taken
back when that wait is over), and reads what the parties of other ranks wait for. What the party here will
never do is refused on its lanes, of which ``refusals`` tells the peers.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from asynccoll import host
from asynccoll.host.store import values

if TYPE_CHECKING:
    from asynccoll.health.refusals import Refusals
    from asynccoll.host.store import Clients
    from asynccoll.order.lane import Lane

__all__ = ["Party", "Unmet"]


class Party(Protocol):
    """One side of something that several ranks do together. Asked from another thread."""

    @property
    def name(self) -> str:
        """Of this one on all of its ranks, and of no other."""

    @property
    def ranks(self) -> Sequence[int]:
        """Those that take part."""

    def waits_for(self) -> Mapping[str, object] | None:
        """What it waits for now, as JSON can say it."""

    def refuses(self, awaited: Mapping[str, object]) -> list[tuple[Lane, int | None, Exception]]:
        """What this rank does not do of what a peer waits for: lane, place (None: its next one), and why."""


class Unmet:
    """This rank's parties."""

    def __init__(self, clients: Clients | None, rank: int, refusals: Refusals) -> None:
        self._clients = clients
        self._rank = rank
        self._refusals = refusals
        self._parties: dict[weakref.ref[Party], None] = {}
        #: what of theirs is written in the store, by their names
        self._said: dict[str, str] = {}
        self._lock = host.Lock()

    def add(self, party: Party) -> None:
        """Ask ``party`` from now on, as long as it lives."""
        if self._clients is not None:
            self._parties = {one: None for one in self._parties if one() is not None} | {
                weakref.ref(party): None
            }

    def withdraw(self, party: Party) -> None:
        """Its wait is over: take back what may have been said of it."""
        if self._said:
            with contextlib.suppress(RuntimeError):  # the store is gone, and who would read it
                self._say(party)

    def look(self) -> None:
        """Say what this rank waits for, and refuse what others wait for in vain."""
        for party in [one() for one in self._parties]:
            if party is not None:
                self._say(party)
                for awaited in self._heard(party):
                    for lane, place, reason in party.refuses(awaited):
                        # What was issued at that place is lost, all parts of it.
                        self._refusals.refuse(lane, reason, place, part=None if place is None else 1)

    def _say(self, party: Party) -> None:
        assert self._clients is not None
        with self._lock:
            awaited = party.waits_for()
            said = "" if awaited is None else json.dumps(awaited)
            if said != self._said.get(party.name, ""):
                with self._clients.borrow() as store:
                    store.set(self._key(party, self._rank), said)
                self._said[party.name] = said
            if not said:
                self._said.pop(party.name, None)

    def _heard(self, party: Party) -> list[Mapping[str, object]]:
        assert self._clients is not None
        keys = [self._key(party, rank) for rank in party.ranks if rank != self._rank]
        with self._clients.borrow() as store:
            said = values(store, [key for key in keys if store.check([key])])
        return [json.loads(one) for one in said if one]

    def _key(self, party: Party, rank: int) -> str:
        return f"asynccoll/unmet/{party.name}/{rank}"

"""Publish what code on top of the operations is blocked on, so that a peer that will never do it refuses.

A lane cannot know that a rank will never make a call; the code that would make it may. Such code registers a
``Party`` (so far ``overlap.turns``, for loops over sharded layers). Nothing is sent as long as all goes well:
the rank's watchdog (``health.watchdog``) calls ``look`` only once something on the rank, whatever it is, has
been waited for for more than a second. That publishes what each party here is blocked on, in one key of the
store per party and rank, and reads what the same parties on the other ranks are blocked on. If a party says
that this rank will never make a call that a peer is waiting for, the call is refused on its lane, and
``refusals`` tells the peers. When the wait ends, its key is cleared.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from asynccoll import host
from asynccoll.health.refusals import Refusals
from asynccoll.host.store import Clients, enlist, values_of_listed
from asynccoll.order.lane import Lane


class Party(Protocol):
    """This rank's side of something that several ranks do together. The watchdog's thread calls it."""

    @property
    def name(self) -> str:
        """The same on all of its ranks, and unique among parties: it is part of the keys."""

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that take part."""

    def waits_for(self) -> Mapping[str, object] | None:
        """Return what it is blocked on now, as JSON values; None if it is not blocked."""

    def refuses(self, awaited: Mapping[str, object]) -> list[tuple[Lane, int | None, int, Exception]]:
        """Return the calls that a peer waits for and this rank will never make: lane, place, count, reason.

        ``place`` is that of a call that was accepted; None for the next ``count`` calls of the lane. Each
        call is returned once: the caller refuses it, and the party remembers that.
        """


class Waits:
    """The parties of this rank, and what is published about them."""

    def __init__(self, clients: Clients | None, rank: int, refusals: Refusals) -> None:
        self._clients = clients
        self._rank = rank
        self._refusals = refusals
        self._parties: dict[weakref.ref[Party], None] = {}
        #: what the store holds, by party; no entry for one that is not blocked
        self._published: dict[str, str] = {}
        self._listed: set[str] = set()  # the parties about which something was published
        #: held from asking a party until the store has its answer: of two threads' answers the later stays
        self._lock = host.Lock()

    def add(self, party: Party) -> None:
        """Ask ``party`` from now on, for as long as it lives."""
        if self._clients is not None:
            # A new dict each time: the watchdog may be iterating over the old one.
            self._parties = {one: None for one in self._parties if one() is not None} | {
                weakref.ref(party): None
            }

    def withdraw(self, party: Party) -> None:
        """Clear what was published about ``party``, whose wait is over."""
        # Checked without the lock, since nearly always nothing was published. If a look is publishing this
        # wait right now, the next look clears it; until then a peer may refuse what it would also have
        # refused a moment earlier.
        if self._published:
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it its readers
                self._publish(party)

    def look(self) -> None:
        """Publish what this rank is blocked on, and refuse what others wait for and will never get."""
        for party in [one() for one in self._parties]:
            if party is not None:
                self._publish(party)
                for awaited in self._read(party):
                    for lane, place, count, reason in party.refuses(awaited):
                        # A call with a place was accepted; parts of it may have been issued, and are lost.
                        part = None if place is None else 1
                        self._refusals.refuse(lane, reason, place, part=part, count=count)

    def _publish(self, party: Party) -> None:
        assert self._clients is not None
        with self._lock:
            awaited = party.waits_for()
            text = "" if awaited is None else json.dumps(awaited)
            if text != self._published.get(party.name, ""):
                with self._clients.borrow() as store:
                    store.set(self._key(party, self._rank), text)
                    if party.name not in self._listed:
                        enlist(store, self._key(party, "any"), self._rank)
                        self._listed.add(party.name)
                self._published[party.name] = text
            if not text:
                self._published.pop(party.name, None)

    def _read(self, party: Party) -> list[Mapping[str, object]]:
        assert self._clients is not None
        keys = {rank: self._key(party, rank) for rank in party.ranks if rank != self._rank}
        with self._clients.borrow() as store:
            texts = values_of_listed(store, self._key(party, "any"), keys)
        return [json.loads(text) for text in texts if text]

    def _key(self, party: Party, of: object) -> str:
        return f"asynccoll/waits/{party.name}/{of}"

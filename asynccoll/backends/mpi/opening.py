"""How communicators are opened: each among its members only, in an order that all ranks agree on.

MPI makes a communicator in a call that waits for all members, and libraries differ in what happens if two
such calls overlap. So a rank first writes to the store that it is ready for a name. The last member to do so
writes the name into a journal, and every rank makes the communicators of which it is a member in the
journal's order. A name's first entry decides its fate, and is written in one request to the store, so that a
rank that dies leaves no decision without an entry, and no gap.

A waiter sleeps outside of MPI. It can give up for all members, which learn that from the journal. Once the
journal says that all members are ready, none can give up any more, so all of them make the call soon.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch.distributed as dist

from asynccoll.backends.api import InProgress, Opening, Waiting, locks, looks
from asynccoll.backends.mpi.library import Library
from asynccoll.errors import AbortedError, CollectiveTimeoutError, PeerLostError

#: MPI bounds names (256 bytes in MPICH); longer ones are shortened with a digest.
_LONGEST_NAME = 200
#: The fate of a name: all members are ready for it, or one has given it up.
_COMPLETE, _GIVEN_UP = "complete", "given up"
#: How long closing waits for communicators that are being made.
_CLOSE_SECONDS = 2.0


class Opener:
    """One rank's side: how far it has read the journal, and the communicators that it has made."""

    def __init__(self, library: Library, base: Any, prefix: str) -> None:
        self._library = library
        self._base = base
        self._rank: int = base.Get_rank()
        self._world = base.Get_group()
        self._prefix = prefix
        self._turn = locks.Lock()
        self._making = InProgress()
        self._read = 0
        self._made: dict[str, object] = {}

    def open(self, opening: Opening) -> object:
        """Open a native communicator, and wait for all of its members."""
        name, ranks, given_up = opening.name, opening.ranks, opening.given_up
        if len(ranks) == 1:
            return self._library.call(self._library.MPI.COMM_SELF.Dup)
        assert opening.clients is not None
        store = Waiting(opening.clients, opening.timeout, given_up)
        self._announce(store, name, ranks)
        made = self._await(store, name, ranks, opening.meeting, given_up)
        if isinstance(made, BaseException):
            raise made
        return made

    def _await(
        self,
        store: dist.Store,
        name: str,
        ranks: tuple[int, ...],
        seconds: float,
        given_up: Callable[[], bool],
    ) -> object:
        deadline = monotonic() + seconds
        for _ in looks():
            with self._turn, self._making:
                if given_up() and self._decide(store, name, ranks, _GIVEN_UP):
                    raise AbortedError(f"opening {name} was given up")
                if monotonic() >= deadline and self._decide(store, name, ranks, _GIVEN_UP):
                    absent = [rank for rank in ranks if not store.check([_ready(name, rank)])]
                    raise CollectiveTimeoutError(
                        f"after {seconds} s rank {', '.join(map(str, absent))} had not joined {name}"
                    )
                self._follow(store)
                if name in self._made:
                    return self._made.pop(name)
        raise AssertionError("there is always another look")

    def _announce(self, store: dist.Store, name: str, ranks: tuple[int, ...]) -> None:
        """Write that this rank is ready for ``name``; the last member to do so writes it into the journal."""
        store.set(_ready(name, self._rank), "")
        if store.add(f"mpi/ready/{name}", 1) == len(ranks):
            with self._turn:
                self._decide(store, name, ranks, _COMPLETE)

    def _decide(self, store: dist.Store, name: str, ranks: tuple[int, ...], fate: str) -> bool:
        """Write the fate of ``name`` into the journal unless it is decided; return whether this rank decided.

        Called with the turn held: an entry that another thread read meanwhile would be missed here.
        """
        if name in self._made:
            return False
        mine = json.dumps([name, ranks, fate, self._rank])
        for place in itertools.count(self._read + 1):
            entry = store.compare_set(_entry(place), "", mine).decode()
            if entry == mine:
                return True
            if json.loads(entry)[0] == name:
                return False
        raise AssertionError("the journal has no end")

    def _follow(self, store: dist.Store) -> None:
        """Make the communicators that the journal lists next, for whichever thread of this rank waits."""
        while store.check([_entry(self._read + 1)]):
            self._read += 1
            name, members, fate, by = json.loads(store.get(_entry(self._read)))
            if self._rank not in members or (by == self._rank and fate == _GIVEN_UP):
                continue
            if fate == _GIVEN_UP:
                self._made[name] = PeerLostError(f"rank {by} had given up opening {name}")
            else:
                try:
                    self._made[name] = self._library.call(self._make, name, members)
                except BaseException as error:  # for the thread that waits for that name to raise
                    self._made[name] = error

    def _make(self, name: str, ranks: list[int]) -> object:
        mpi = self._library.MPI
        group = self._world.Incl(ranks)
        try:
            if self._library.by_name:
                tag = self._prefix + _short(name)
                create = mpi.Intracomm.Create_from_group
                made = create(group, tag, mpi.INFO_NULL, mpi.ERRORS_RETURN)
            else:
                made = self._base.Create_group(group, 0)
        finally:
            group.Free()
        made.Set_errhandler(mpi.ERRORS_RETURN)
        return made

    def close(self) -> None:
        """Wait until no communicator is being made, since the interpreter must not end meanwhile."""
        self._making.wait(_CLOSE_SECONDS)
        if not self._library.MPI.Is_finalized():  # else by the user, before us
            self._world.Free()


def _ready(name: str, rank: int) -> str:
    return f"mpi/ready/{name}/{rank}"


def _entry(place: int) -> str:
    return f"mpi/journal/{place}"


def _short(name: str) -> str:
    """Return ``name`` as MPI takes it: ASCII, of bounded length, different for different names."""
    plain = name.encode("ascii", "backslashreplace").decode()
    if len(plain) <= _LONGEST_NAME:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{plain[: _LONGEST_NAME - len(digest) - 1]}#{digest}"

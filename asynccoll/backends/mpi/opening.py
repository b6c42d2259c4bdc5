"""How communicators come to be: each among its members only, in an order that all ranks agree on.

MPI makes a communicator in a call that waits for all members, and libraries differ in what happens
when two such calls cross. So a rank first says in the store that it is ready for a name; the last
member to say so writes the name into a journal; and every rank makes the communicators it is a
member of in the journal's order. A name's first entry decides what becomes of it, and is one request to the
store, so that a rank which dies leaves no decision without an entry, and no gap. A waiter sleeps, outside of
MPI, and can give up, for all members, who learn it from the journal; once the journal says that all are
ready, all of them come at once, for who is ready cannot give up any more.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from asynccoll.backends.api import InProgress, Opening, Waiting
from asynccoll.backends.mpi.library import Library
from asynccoll.errors import AbortedError, CollectiveTimeoutError, PeerLostError

if TYPE_CHECKING:
    import torch.distributed as dist


__all__ = ["Opener"]

#: MPI bounds names (256 bytes in MPICH); longer ones are shortened with a digest.
_LONGEST_NAME = 200
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02
#: What becomes of a name: all members have come, or one does not want it any more.
_COMPLETE, _GIVEN_UP = "complete", "given up"
#: How long closing waits for communicators that are being made just now.
_CLOSE_SECONDS = 2.0


class Opener:
    """This rank's side: its place in the journal, and the communicators it has made."""

    def __init__(self, library: Library, base: Any, prefix: str) -> None:
        self._library = library
        self._base = base
        self._rank: int = base.Get_rank()
        self._world = base.Get_group()
        self._prefix = prefix
        self._turn = threading.Lock()
        self._making = InProgress()
        self._read = 0
        self._made: dict[str, object] = {}

    def open(self, opening: Opening) -> object:
        """The native communicator that is asked for; waits for all of its members."""
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
        pause = _FIRST_PAUSE_SECONDS
        while True:
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
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _announce(self, store: dist.Store, name: str, ranks: tuple[int, ...]) -> None:
        """Say that this rank is ready for ``name``; the last to say so writes that into the journal."""
        store.set(_ready(name, self._rank), "")
        if store.add(f"mpi/ready/{name}", 1) == len(ranks):
            with self._turn:
                self._decide(store, name, ranks, _COMPLETE)

    def _decide(self, store: dist.Store, name: str, ranks: tuple[int, ...], fate: str) -> bool:
        """Write into the journal what becomes of ``name``, unless that is decided; whether this rank did.

        Called with the turn held, for what is read of the journal meanwhile would not be seen here.
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
        """Make what the journal says next, for whichever thread of this rank has asked for it."""
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
                except BaseException as error:  # belongs to the caller that asked for that name
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
        """Nothing is being made any more, or the interpreter could end under it."""
        self._making.wait(_CLOSE_SECONDS)
        if not self._library.MPI.Is_finalized():  # by the user, before us
            self._world.Free()


def _ready(name: str, rank: int) -> str:
    return f"mpi/ready/{name}/{rank}"


def _entry(place: int) -> str:
    return f"mpi/journal/{place}"


def _short(name: str) -> str:
    """``name`` as MPI takes it: ASCII, of bounded length, different for different names."""
    plain = name.encode("ascii", "backslashreplace").decode()
    if len(plain) <= _LONGEST_NAME:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{plain[: _LONGEST_NAME - len(digest) - 1]}#{digest}"

"""Process sets by their ranks, made one after the other on a separate thread, in the same order on all ranks.

To make a process set, every rank calls Horovod, and all have to pass the same ranks; if they do not, Horovod
ends on all of them. So each rank writes to the store which sets it wants. The last rank to want a set writes
it into a journal, and every rank makes the sets in the journal's order. If a rank never asks for a set, the
others wait for it in the store, outside of Horovod, where it can be named.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch.distributed as dist

from asynccoll.backends.api import Clients, Opening, Promise, locks, looks, start_once
from asynccoll.backends.horovod.failures import typed
from asynccoll.errors import AbortedError

#: How often a lane that waits for a process set checks whether it is still wanted.
_LOOK_SECONDS = 0.1
#: How long closing waits for the set that is being made.
_CLOSE_SECONDS = 2.0


class ProcessSets:
    """This rank's process sets, and how far it has read the journal."""

    def __init__(self, hvd: ModuleType) -> None:
        self._hvd = hvd
        self._rank: int = hvd.rank()
        self._size: int = hvd.size()
        self._lock = locks.Lock()
        self._made: dict[tuple[int, ...], Promise] = {}
        self._sets: dict[tuple[int, ...], object] = {}
        #: the ranks of sets that are not made yet, by the group's key; and the keys written to the store
        self._wanted: dict[str, tuple[int, ...]] = {}
        self._said: set[str] = set()
        self._read = 0
        self._clients: Clients | None = None
        self._thread: threading.Thread | None = None

    def register(self, opening: Opening) -> None:
        """Have the process set of these ranks made, once all ranks have asked for it; returns at once."""
        with self._lock:
            if self._made.setdefault(opening.ranks, Promise()).done():
                return
            self._clients = opening.clients
            self._wanted[opening.group] = opening.ranks
            if self._thread is None:
                run = partial(self._run, opening.given_up)
                start_once("asynccoll-groups", run, partial(setattr, self, "_thread"))

    def wait(self, ranks: tuple[int, ...], given_up: Callable[[], bool]) -> object:
        """Wait until every rank has asked for the process set of ``ranks``, and return it.

        Raises:
            AbortedError: ``given_up()`` turned true.
        """
        made = self._made[ranks]
        while not made.wait(_LOOK_SECONDS):
            if given_up():
                raise AbortedError(f"waiting for the process set {list(ranks)} was given up")
        error = made.error()
        if error is not None:
            raise error
        return self._sets[ranks]

    def absent(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that have yet to ask for the process set of ``ranks``; () once it is made."""
        with self._lock:
            key = next((key for key, wanted in self._wanted.items() if wanted == ranks), None)
        if key is None or self._clients is None:
            return ()
        with self._clients.borrow() as store:
            return tuple(rank for rank in range(self._size) if not store.check([_wants(key, rank)]))

    def close(self) -> None:
        """Wait for the thread: no more sets are made, since those who waited for one have given up."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _run(self, given_up: Callable[[], bool]) -> None:
        for _ in looks():
            over: BaseException | None = AbortedError("its world was left") if given_up() else None
            try:
                self._go_on()  # also at the end, since the other ranks make what is in the journal
            except Exception as error:  # the store is gone, with the rank that served it
                over = error
            with self._lock:
                unmade = [*self._wanted.values()] if over is not None else []
                if over is not None:
                    self._wanted.clear()
                if not self._wanted:
                    self._thread = None
                    break
        for ranks in unmade:
            self._made[ranks].settle(over)

    def _go_on(self) -> None:
        """Write which sets are wanted here, and make those that all ranks want."""
        assert self._clients is not None
        with self._lock:
            wanted = [key for key in self._wanted if key not in self._said]
        for key in wanted:
            with self._clients.borrow() as store:
                self._say(store, key)
            self._said.add(key)
        while key := self._next():
            with self._lock:
                ranks = self._wanted[key]
            self._make(ranks)
            with self._lock:
                del self._wanted[key]

    def _say(self, store: dist.Store, key: str) -> None:
        """Write that this rank wants the set; the last rank to do so writes it into the journal."""
        store.set(_wants(key, self._rank), "")
        if store.add(f"horovod/wanted/{key}", 1) == self._size:
            places = itertools.count(self._read + 1)
            while store.compare_set(_entry(next(places)), "", key).decode() != key:
                pass

    def _next(self) -> str:
        """Return the key of the next process set to make; "" if the journal has no more."""
        assert self._clients is not None
        with self._clients.borrow() as store:
            if not store.check([_entry(self._read + 1)]):
                return ""
            self._read += 1
            return store.get(_entry(self._read)).decode()

    def _make(self, ranks: tuple[int, ...]) -> None:
        try:
            self._sets[ranks] = self._known(ranks) or self._hvd.add_process_set(list(ranks))
        except Exception as error:
            self._made[ranks].settle(typed(error, f"making the process set {list(ranks)}"))
        else:
            self._made[ranks].settle()

    def _known(self, ranks: tuple[int, ...]) -> object:
        """Return the process set of these ranks if the user has made one: Horovod refuses a second."""
        from horovod.common import process_sets

        for number, members in process_sets._basics._get_process_set_ids_and_ranks().items():
            if tuple(members) == ranks and number:
                found = process_sets.ProcessSet(list(ranks))
                found.process_set_id = number
                return found
        return None


def _wants(key: str, rank: int) -> str:
    return f"horovod/wanted/{key}/{rank}"


def _entry(place: int) -> str:
    return f"horovod/journal/{place}"

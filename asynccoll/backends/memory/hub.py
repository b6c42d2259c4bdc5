"""What one rank shares with the others of its host: arenas, bells, and notice of processes that have ended.

A hub is made once for a world, when its ranks meet; the lanes take their regions from it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from asynccoll.backends.api import Clients, Opening, Waiters, locks, usable_cores, values
from asynccoll.backends.memory.arena import Arena, map_region
from asynccoll.backends.memory.layout import ABORTED, ASLEEP, BLOCK_WORDS, LEFT, STATE, Layout
from asynccoll.backends.memory.moving import Mover
from asynccoll.backends.memory.neighbours import (
    MOST_RANKS,
    Descriptors,
    Failed,
    Meeting,
    hand_in,
    own,
    prove,
    write_words,
)
from asynccoll.backends.memory.parking import Parking
from asynccoll.backends.memory.region import Region
from asynccoll.backends.memory.watcher import Watcher
from asynccoll.errors import CollectiveError, CollectiveTimeoutError, PeerLostError

_helpers = Waiters("asynccoll-memory-helper")


class Hub:
    """One rank's access to the others of its host: their arenas, their bells and their processes."""

    def __init__(self, arena: Arena, ranks: Sequence[int], rank: int, handed: Sequence[Descriptors]) -> None:
        self._arena = arena
        # held while a bell is rung, so that it is not closed meanwhile; a finalizer may ring another one then
        self._ringing = locks.RLock()
        self._handed = dict(zip(ranks, handed, strict=True))
        others = {one: held.process for one, held in self._handed.items() if one != rank}
        self.watcher: Watcher = Watcher(self._handed[rank].bell, others)
        self.crowded: bool = len(ranks) > usable_cores()

    @classmethod
    def meet(cls, clients: Clients, node: str, ranks: Sequence[int], rank: int, seconds: float) -> Hub:
        """Meet the others of ``ranks``, which should be on one host.

        If they cannot share memory, ``Failed`` is raised on all of them.
        """
        made, why = _made()
        said = _Said(clients, f"memory/{node}", ranks.index(rank), len(ranks), seconds)
        try:
            handed = _handed(said, made, why)
        except BaseException:
            if made is not None:
                made[1].close()
            raise
        assert made is not None  # or all would have failed
        return cls(made[0], ranks, rank, handed)

    def region(self, opening: Opening) -> tuple[Region, Parking]:
        """Return the memory of a lane, lent by its first rank. Waits until all of its ranks have called."""
        assert opening.clients is not None
        key = f"{opening.name}/memory"
        if opening.rank == 0:
            offset, layout = self._lend(opening, key)
        else:
            _meet(opening, key)
            with opening.clients.borrow() as store:
                offset, slot_bytes = json.loads(store.get(key))
            layout = Layout(opening.size, slot_bytes)
        try:
            buffer = map_region(self._handed[opening.ranks[0]].arena, offset, layout.total_bytes)
            return Region(buffer, layout, opening.rank), Parking(buffer)
        except BaseException:  # no address space, say; the other ranks take this one for a member by now
            self._leave(opening, offset)
            raise

    def _leave(self, opening: Opening, offset: int) -> None:
        """Leave a lane whose memory this rank has not mapped: its word there is written through the file."""
        words = offset + opening.rank * BLOCK_WORDS * 8
        lender = self._handed.get(opening.ranks[0])
        if lender is None:  # the hub is closed: the others learn that this rank has left its world
            return
        arena = lender.arena
        os.pwrite(arena, ABORTED.to_bytes(8, sys.byteorder), words + STATE * 8)
        for rank in opening.ranks:
            self.ring(rank)
        os.pwrite(arena, (1).to_bytes(8, sys.byteorder), words + LEFT * 8)

    def _lend(self, opening: Opening, key: str) -> tuple[int, Layout]:
        """Lend memory to a lane, as its first rank, and wait until all of its ranks have called.

        Returns its offset and its layout.
        """
        assert opening.clients is not None
        offset, layout = self._arena.lend(opening.size)
        try:
            with opening.clients.borrow() as store:
                store.set(key, json.dumps([offset, layout.slot_bytes]))
            _meet(opening, key)
        except CollectiveError:  # raised on every rank, so that none of them maps the region
            self._arena.withdraw(offset)
            raise
        except BaseException:  # the store has failed, say; the others may have agreed to use the region
            self._leave(opening, offset)
            raise
        return offset, layout

    def later(self, job: Callable[[], object]) -> None:
        """Run ``job``, which may wait, on another thread."""
        _helpers.submit(object(), job)  # the key is not the job, since an idle thread keeps its last key

    def ring(self, rank: int) -> None:
        """Have the watcher of ``rank`` look at its regions; do nothing once the hub is closed."""
        if self._handed:  # else this may be a forked child, in which the lock may be held forever
            with self._ringing:
                if (handed := self._handed.get(rank)) is not None:
                    os.eventfd_write(handed.bell, 1)

    def close(self) -> None:
        """Stop the watcher and close all descriptors, once all lanes are closed."""
        self.watcher.stop()
        with self._ringing:
            self._close()

    def disown(self) -> None:
        """Close a forked child's copies of the descriptors; it has nothing else of the hub."""
        self._close()

    def _close(self) -> None:
        """Close the descriptors: their numbers may be other files' from now on."""
        descriptors, self._handed = self._handed, {}
        self._arena.descriptor = -1
        for handed in descriptors.values():
            handed.close()


def _meet(opening: Opening, key: str) -> None:
    """Wait for the other ranks of a lane. Either all of them go on, or all raise ``CollectiveError``."""
    clients, failed = opening.clients, None
    assert clients is not None
    try:
        clients.meet(opening.name, opening.rank, opening.size, opening.meeting, opening.given_up)
    except CollectiveError as error:
        failed = error
    with clients.borrow() as store:
        decided = store.compare_set(f"{key}/fate", "", "given up" if failed else "complete")
    if decided == b"given up":
        raise failed or PeerLostError(f"another rank had given up opening {opening.name}")


def said_at(clients: Clients, keys: list[str], seconds: float, why: str) -> list[str]:
    """Return the texts under ``keys``, each of another rank; wait up to ``seconds`` for them.

    ``why`` follows the number of those that are missing in the ``CollectiveTimeoutError``.
    """
    missing = clients.await_keys(keys, seconds, lambda: False)
    if missing:
        raise CollectiveTimeoutError(f"after {seconds:g} s {len(missing)} {why}")
    with clients.borrow() as store:
        return [said.decode() for said in values(store, keys)]


class _Said:
    """Texts that the ranks of a node tell each other in the store."""

    def __init__(self, clients: Clients, prefix: str, index: int, count: int, seconds: float) -> None:
        self._clients = clients
        self._prefix = prefix
        self.index = index
        self.count = count
        self.seconds = seconds

    def by_each(self, name: str, value: str) -> list[str]:
        """Say ``value`` under ``name``, wait for all ranks, and return what each of them said, in order."""
        keys = [f"{self._prefix}/{name}/{index}" for index in range(self.count)]
        with self._clients.borrow() as store:
            store.set(keys[self.index], value)
        return said_at(self._clients, keys, self.seconds, "ranks of this host had not joined to share memory")

    @contextmanager
    def all_or_none(self, name: str) -> Iterator[Callable[[], bool]]:
        """Run the block on all ranks, and raise ``Failed`` on all if it fails on one.

        The block gets a function that returns whether it has already failed on another rank.
        """
        why = ""
        try:
            yield partial(self._has_failed, name)
        except (Failed, OSError) as error:
            why = str(error)
        reasons = [said for said in self.by_each(name, why) if said]
        if reasons:
            raise Failed(reasons[0])

    def _has_failed(self, name: str) -> bool:
        keys = [f"{self._prefix}/{name}/{index}" for index in range(self.count)]
        with self._clients.borrow() as store:
            return any(store.check([key]) and store.get(key) for key in keys)


def _made() -> tuple[tuple[Arena, Descriptors] | None, str]:
    """Return this rank's arena and descriptors, or why there are none: a container may forbid the calls."""
    try:
        arena = Arena()
    except OSError as error:
        return None, f"shared memory cannot be created: {error}"
    try:
        return (arena, own(arena)), ""
    except OSError as error:
        arena.close()
        return None, f"this process cannot give other processes a handle to itself: {error}"


def _handed(said: _Said, made: tuple[Arena, Descriptors] | None, why: str) -> list[Descriptors]:
    """Return the descriptors of all ranks, once these have proved that they share memory.

    The outcome of each step that may fail on one rank is shared with all, so that all fail, or none.
    """
    index, count, seconds = said.index, said.count, said.seconds
    if count > MOST_RANKS:
        raise Failed(f"more than {MOST_RANKS} ranks on one host")
    with ExitStack() as taken:
        meeting = None
        if index == 0 and made is not None:
            try:
                meeting = taken.enter_context(closing(Meeting()))
            except OSError as error:
                why = f"there is no socket for the rendezvous: {error}"
        told = said.by_each("at", json.dumps(["" if meeting is None else meeting.address, why]))
        ready = [json.loads(one) for one in told]
        unable = [reason for _, reason in ready if reason]
        if unable or made is None:
            raise Failed(unable[0])
        mine = made[1]
        with said.all_or_none("met") as somebody_failed:
            if meeting is not None:
                handed = meeting.gather(count - 1, mine, seconds, somebody_failed)
            else:
                handed = hand_in(ready[0][0], index, count, mine, seconds)
            for one in handed:
                if one is not mine:
                    taken.callback(one.close)
        arenas = [one.arena for one in handed]
        words = said.by_each("words", _written(arenas, index))
        with said.all_or_none("proved"):
            prove(arenas, words)
        taken.pop_all()
    return handed


def _written(arenas: Sequence[int], index: int) -> str:
    """Write this rank's word to all arenas, and return it; return an empty string if that fails."""
    try:
        return write_words(arenas, index)
    except OSError:
        return ""


class Bells:
    """How the ranks of one region wake each other (``moving.Bells``)."""

    def __init__(self, hub: Hub, parking: Parking, ranks: Sequence[int], index: int) -> None:
        self.crowded: bool = hub.crowded
        self._hub = hub
        self._parking = parking
        self._ranks = ranks
        self._mine = _asleep(index)
        self._gone = hub.watcher.gone

    def sleep(self, said: int, seconds: float) -> None:
        self._parking.sleep(self._mine, said, seconds)

    def wake(self, index: int) -> None:
        self._parking.wake(_asleep(index))

    def ring(self, index: int) -> None:
        self._hub.ring(self._ranks[index])

    def watch(self, mover: Mover) -> None:
        self._hub.watcher.add(mover)

    def later(self, job: Callable[[], object]) -> None:
        self._hub.later(job)

    def gone(self) -> Sequence[int]:
        if not self._gone:
            return ()
        return [rank for rank in tuple(self._gone) if rank in self._ranks]


def _asleep(index: int) -> int:
    return (index * BLOCK_WORDS + ASLEEP) * 8

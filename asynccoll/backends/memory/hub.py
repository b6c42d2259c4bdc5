"""What one rank shares with the others of its host: arenas, bells, and word of who is gone.

Made once for a world, when it comes together; its lanes take their regions from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from asynccoll.backends.api import Waiters, usable_cores, values
from asynccoll.backends.memory.arena import Arena, map_region
from asynccoll.backends.memory.layout import ASLEEP, BLOCK_WORDS, Layout
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
from asynccoll.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from asynccoll.backends.api import Clients, Opening
    from asynccoll.backends.memory.engine import Engine

__all__ = ["Bells", "Hub"]


_helpers = Waiters("asynccoll-memory-helper")


class Hub:
    """The ranks of one host that share memory, as one of them knows them."""

    def __init__(self, arena: Arena, ranks: Sequence[int], rank: int, handed: Sequence[Descriptors]) -> None:
        self.ranks = frozenset(ranks)
        self._arena = arena
        self._handed = dict(zip(ranks, handed, strict=True))
        self._mine = self._handed[rank]
        others = {one: held.process for one, held in self._handed.items() if one != rank}
        self.watcher = Watcher(self._mine.bell, others)
        self.crowded = len(ranks) > usable_cores()

    @classmethod
    def meet(cls, clients: Clients, node: str, ranks: Sequence[int], rank: int, seconds: float) -> Hub:
        """Meet the others of ``ranks``, said to be on one host; raises ``Failed`` on all of them."""
        arena = Arena()
        mine = own(arena)
        try:
            handed = _handed(clients, node, ranks, rank, mine, seconds)
        except BaseException:
            mine.close()
            raise
        return cls(arena, ranks, rank, handed)

    def region(self, opening: Opening) -> tuple[Region, Parking]:
        """The memory of a lane, which its first rank lends; all ranks of it have come."""
        assert opening.clients is not None
        key = f"{opening.name}/memory"
        if opening.rank == 0:
            offset, layout = self._arena.lend(opening.size)
            with opening.clients.borrow() as store:
                store.set(key, json.dumps([offset, layout.slot_bytes]))
        opening.clients.meet(opening.name, opening.rank, opening.size, opening.meeting, opening.given_up)
        with opening.clients.borrow() as store:
            offset, slot_bytes = json.loads(store.get(key))
        layout = Layout(opening.size, slot_bytes)
        buffer = map_region(self._handed[opening.ranks[0]].arena, offset, layout.total_bytes)
        return Region(buffer, layout, opening.rank), Parking(buffer)

    def ring(self, rank: int) -> None:
        """Have the watcher of ``rank`` look."""
        os.eventfd_write(self._handed[rank].bell, 1)

    def take_back(self) -> None:
        """Give back what lanes that are closed have used."""
        self._arena.take_back()

    def close(self) -> None:
        """All lanes are closed."""
        self.watcher.stop()
        for handed in self._handed.values():
            handed.close()

    def disown(self) -> None:
        """In a forked child, which has nothing of it but copies of the descriptors."""
        for handed in self._handed.values():
            handed.close()


class _Said:
    """What the ranks of a node tell each other in the store."""

    def __init__(self, clients: Clients, prefix: str, index: int, count: int, seconds: float) -> None:
        self._clients = clients
        self._prefix = prefix
        self._index = index
        self._count = count
        self._seconds = seconds

    def by_each(self, name: str, value: str) -> list[str]:
        """What every rank says, in order; this one says ``value``."""
        keys = [f"{self._prefix}/{name}/{index}" for index in range(self._count)]
        with self._clients.borrow() as store:
            store.set(keys[self._index], value)
        missing = self._clients.await_keys(keys, self._seconds, lambda: False)
        if missing:
            raise CollectiveTimeoutError(
                f"after {self._seconds:g} s {len(missing)} ranks of this host had not come to share memory"
            )
        with self._clients.borrow() as store:
            return [said.decode() for said in values(store, keys)]

    def by_first(self, name: str, value: str) -> str:
        """What the first rank says."""
        return self.by_each(name, value)[0]

    @contextmanager
    def all_or_none(self, name: str) -> Iterator[Callable[[], bool]]:
        """Raise ``Failed`` on all ranks if the block does on one; gives whether it has on another one."""
        why = ""
        try:
            yield partial(self._has_failed, name)
        except Failed as error:
            why = str(error)
        reasons = [said for said in self.by_each(name, why) if said]
        if reasons:
            raise Failed(reasons[0])

    def _has_failed(self, name: str) -> bool:
        keys = [f"{self._prefix}/{name}/{index}" for index in range(self._count)]
        with self._clients.borrow() as store:
            return any(store.check([key]) and store.get(key) for key in keys)


def _handed(
    clients: Clients, node: str, ranks: Sequence[int], rank: int, mine: Descriptors, seconds: float
) -> list[Descriptors]:
    """What each of ``ranks`` has handed in, once all have proved that they share memory.

    Each step that may fail on one rank is told to all: so all fail, or none.
    """
    index, count = ranks.index(rank), len(ranks)
    said = _Said(clients, f"memory/{node}", index, count, seconds)
    if count > MOST_RANKS:
        raise Failed(f"more than {MOST_RANKS} ranks on one host")
    meeting = Meeting() if index == 0 else None
    address = said.by_first("at", "" if meeting is None else meeting.address)
    with said.all_or_none("met") as somebody_failed:
        if meeting is not None:
            handed = meeting.gather(count - 1, mine, seconds, somebody_failed)
        else:
            handed = hand_in(address, index, count, mine, seconds)
    arenas = [one.arena for one in handed]
    words = said.by_each("words", write_words(arenas, index))
    with said.all_or_none("proved"):
        prove(arenas, words)
    return handed


class Bells:
    """How the ranks of one region wake each other (``engine.Bells``)."""

    def __init__(self, hub: Hub, parking: Parking, ranks: Sequence[int], index: int) -> None:
        self.crowded = hub.crowded
        self._hub = hub
        self._parking = parking
        self._ranks = ranks
        self._indices = {rank: place for place, rank in enumerate(ranks)}
        self._mine = _asleep(index)
        self._gone = hub.watcher.gone

    def sleep(self, said: int, seconds: float) -> None:
        self._parking.sleep(self._mine, said, seconds)

    def wake(self, index: int) -> None:
        self._parking.wake(_asleep(index))

    def ring(self, index: int) -> None:
        self._hub.ring(self._ranks[index])

    def watch(self, engine: Engine) -> None:
        self._hub.watcher.add(engine)

    def later(self, job: Callable[[], object]) -> None:
        _helpers.submit(job, job)

    def gone(self) -> Sequence[int]:
        if not self._gone:
            return ()
        return [self._indices[rank] for rank in tuple(self._gone) if rank in self._indices]


def _asleep(index: int) -> int:
    return (index * BLOCK_WORDS + ASLEEP) * 8

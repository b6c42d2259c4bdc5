"""How a rank leaves its world: what it publishes in the store, and what ranks that left before published.

A rank that has left in order is not lost: the others may go on without it, up to the calls that it never
made. This module must not know how a lost rank is dealt with.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping

from asynccoll.health.liveness import Liveness
from asynccoll.host.store import Clients
from asynccoll.order.lane import Lane


class Farewells:
    """The farewells of the ranks of one world, in its store."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        clients: Clients | None,
        liveness: Liveness,
        lanes: Callable[[], Iterable[Lane]],
    ) -> None:
        """``lanes`` returns all open lanes."""
        self._rank = rank
        self._staying = [*range(1, world_size)]  # those not known to have left; rank 0 may serve the store
        self._clients = clients if world_size > 1 else None
        self._liveness = liveness
        self._lanes = lanes

    def say(self) -> None:
        """Publish how many calls this rank has made on each lane: for those calls it does not count as lost.

        A refused call counts as made if the peers have been told of it, or will learn of it from what has
        already been published. A lane that failed before it had issued all of its calls is marked.
        """
        if self._clients is None:
            return
        lanes = list(self._lanes())
        made = {_name(lane): lane.halting.announced for lane in lanes}
        failed = [one for one in lanes if one.broken is not None and made[_name(one)] < one.sequence]
        made |= dict.fromkeys(map(_failed, failed), 1)
        with contextlib.suppress(RuntimeError), self._clients.borrow() as store:
            store.set(_farewell(self._rank), json.dumps(made))

    def of(self, ranks: Iterable[int]) -> dict[int, dict[str, int]]:
        """Return, for each of ``ranks`` that left with ``finalize``, how many calls it made, by lane."""
        said: dict[int, dict[str, int]] = {}
        if self._clients is not None:
            with contextlib.suppress(RuntimeError), self._clients.borrow() as store:
                for rank in ranks:
                    if store.check([_farewell(rank)]):
                        said[rank] = json.loads(store.get(_farewell(rank)))
        return said

    def leave(self, patience: float) -> None:
        """Note in the store that this rank leaves; rank 0, which may serve it, waits for the others to leave.

        Rank 0 stops waiting after ``patience`` seconds, or when all ranks that have not left are dead.
        """
        if self._clients is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, with the rank that served it
            if self._rank > 0:
                if not self._liveness.lost((0,)):
                    with self._clients.borrow() as store:
                        store.set(_left(self._rank), "")
                return
            self._clients.await_keys([_left(r) for r in self._staying], patience, self._only_dead_stay)

    def _only_dead_stay(self) -> bool:
        """Whether all ranks that have not left are dead.

        One that is alive settles it. So the others are asked about only if the first that stays is dead: a
        large world would otherwise make a request for each of its ranks at each look.
        """
        assert self._clients is not None
        with self._clients.borrow() as store:
            while self._staying and store.check([_left(self._staying[0])]):
                del self._staying[0]
            if self._staying and not self._liveness.lost((self._staying[0],)):
                return False
            self._staying = [rank for rank in self._staying if not store.check([_left(rank)])]
        return set(self._staying) <= set(self._liveness.lost(tuple(self._staying)))


def made_on(lane: Lane, left: Mapping[int, Mapping[str, int]]) -> dict[int, int]:
    """Return how many calls each member of the lane that has ``left`` had made there."""
    return {rank: told.get(_name(lane), 0) for rank, told in left.items() if rank in lane.group.ranks}


def failed_on(lane: Lane, said: Mapping[str, int]) -> bool:
    """Whether the rank that ``said`` this as it left had made more calls there: it skipped none."""
    return _failed(lane) in said


def _name(lane: Lane) -> str:
    return f"{lane.group.key}/{lane.key}"


def _failed(lane: Lane) -> str:
    return f"{_name(lane)} failed"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _farewell(rank: int) -> str:
    return f"farewell/{rank}"

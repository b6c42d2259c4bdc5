"""Draws training programs for a given time, and reports how many there were and what was found.

``python tests/explore_training.py SECONDS [RANKS,RANKS...]``; the backend is that of the tests
(``ASYNCCOLL_TEST_BACKENDS``); the seed is random and printed (``SEED`` repeats one). ``STOP=1`` stops at the
first fault, and ``SIMULATED=1`` trains each in a simulated world, in a different order.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import time
from typing import Any

import worlds
from asynccoll.testing import PCT, RandomWalk, simulate
from programs import Program, drawn, same_as_alone
from simulated import SimulatedRank

#: Helpers that need torch's own process group, which a simulated world lacks.
_WITH_TORCHS_GROUP = {"auto_model", "ddp_hook"}


class Exploration:
    """The programs drawn so far, and the faults found."""

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.simulated = bool(os.environ.get("SIMULATED"))
        self.backend = "simulated" if self.simulated else worlds.BACKENDS[0]
        self.drawn: collections.Counter[int] = collections.Counter()
        self.found: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline or bool(self.found and os.environ.get("STOP"))

    def look_at(self, program: Program, size: int, label: str) -> None:
        if self.simulated and program.helper in _WITH_TORCHS_GROUP:
            return
        self.drawn[size] += 1
        if self.simulated:
            self._simulate(program, size, label)
            return
        world = worlds.world(self.backend, size)
        try:
            world.run(same_as_alone, [(label, program)], timeout=30)
        except worlds.RankError as error:
            self._tell_of(f"{label} on {size} ranks: {program!r}", error)
            world.kill()  # its lanes may be out of step

    def _simulate(self, program: Program, size: int, label: str) -> None:
        order = self.drawn.total()

        async def main(rank: int) -> None:
            me: Any = SimulatedRank(rank, size, set())
            await same_as_alone(me, [(label, program)])

        try:
            simulate(
                main,
                world_size=size,
                seed=order,
                schedule=PCT() if order % 2 else RandomWalk(),
                timeout=600.0,
            ).check()
        except (AssertionError, TimeoutError) as error:
            self._tell_of(f"{label} on {size} ranks, order {order}: {program!r}", error)

    def _tell_of(self, what: str, error: Exception) -> None:
        took = f"program {self.drawn.total()}, {time.monotonic() - self.begun:.0f} s"
        self.found.append(what)
        print(f"=== {took}: {what}\n{str(error)[:12000]}", flush=True)

    def tell(self) -> None:
        seconds = time.monotonic() - self.begun
        took = f"{seconds:.0f} s on {self.backend}"
        print(f"{self.drawn.total()} programs in {took}, by ranks: {dict(self.drawn)}")
        for one in self.found or ["nothing was found"]:
            print(f"    {one}", flush=True)


def explore(exploration: Exploration, ranks: list[int], number: int) -> None:
    """Try twenty programs on each number of ranks in turn, from this seed on, until the time is up."""
    while not exploration.over:
        for size in ranks:
            for _ in range(20):
                if not exploration.over:
                    backend = "gloo" if exploration.simulated else exploration.backend
                    exploration.look_at(drawn(number, backend), size, f"seed {number}")
                number += 1


def main() -> int:
    """Explore, and fail if something was found."""
    seconds, *sizes = sys.argv[1:]
    ranks = [int(size) for size in sizes[0].split(",")] if sizes else [2, 2, 3, 1, 5]
    number = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {number}", flush=True)
    exploration = Exploration(float(seconds))
    try:
        explore(exploration, ranks, number)
    finally:
        exploration.tell()
        worlds.close_all()
    return 1 if exploration.found else 0


if __name__ == "__main__":
    sys.exit(main())

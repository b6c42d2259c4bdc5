"""Draws training programs for as long as it is told, and tells what it found and how many there were.

``python tests/explore_training.py SECONDS [RANKS,RANKS...]``; the backend is that of the tests
(``ASYNCCOLL_TEST_BACKENDS``), the seed is drawn and said (``SEED`` repeats one). With ``STOP=1`` the first
that is found is enough.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import time

import worlds
from programs import Program, drawn, same_as_alone


class Exploration:
    """What was drawn so far, and what was found."""

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.backend = worlds.BACKENDS[0]
        self.drawn: collections.Counter[int] = collections.Counter()
        self.found: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline or bool(self.found and os.environ.get("STOP"))

    def look_at(self, program: Program, size: int, label: str) -> None:
        self.drawn[size] += 1
        world = worlds.world(self.backend, size)
        try:
            world.run(same_as_alone, [(label, program)], timeout=30)
        except worlds.RankError as error:
            took = f"program {self.drawn.total()}, {time.monotonic() - self.begun:.0f} s"
            self.found.append(f"{label} on {size} ranks: {program!r}")
            print(f"=== {took}: {self.found[-1]}\n{str(error)[:12000]}", flush=True)
            world.kill()  # its lanes may be out of step

    def tell(self) -> None:
        seconds = time.monotonic() - self.begun
        took = f"{seconds:.0f} s on {self.backend}"
        print(f"{self.drawn.total()} programs in {took}, by ranks: {dict(self.drawn)}")
        for one in self.found or ["nothing was found"]:
            print(f"    {one}", flush=True)


def main() -> int:
    """Explore, and fail if something was found."""
    seconds, *sizes = sys.argv[1:]
    ranks = [int(size) for size in sizes[0].split(",")] if sizes else [2, 2, 3, 1, 5]
    number = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {number}", flush=True)
    exploration = Exploration(float(seconds))
    try:
        while not exploration.over:
            for size in ranks:
                for _ in range(20):
                    if not exploration.over:
                        exploration.look_at(drawn(number, exploration.backend), size, f"seed {number}")
                    number += 1
    finally:
        exploration.tell()
        worlds.close_all()
    return 1 if exploration.found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws programs and orders for as long as it is told, in simulated worlds, and tells what it found.

``python tests/explore_simulated.py SECONDS [RANKS,RANKS...]``; the seed is drawn and said (``SEED`` repeats
one), ``SCHEDULES`` is how many orders of each program are tried. What is found is made smaller and said as a
script that replays it.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings

import asynccoll as ac
from asynccoll.testing import PCT, RandomWalk
from compositions import Program
from compositions_drawn import programs
from compositions_reduced import reduced
from compositions_tried import kinds
from simulated import complaints, script

SCHEDULES = int(os.environ.get("SCHEDULES", "8"))
#: Seconds for making one smaller that failed.
REDUCING_SECONDS = float(os.environ.get("REDUCING", "60"))
REAL_SECONDS = 60.0


class Exploration:
    """What was tried so far, and what was found."""

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.programs = self.schedules = 0
        self.found: list[str] = []

    @property
    def over(self) -> bool:
        return bool(self.found) or time.monotonic() > self.deadline

    def look_at(self, program: Program) -> None:
        if self.over:
            return
        self.programs += 1
        for number in range(SCHEDULES):
            if self.over:
                return
            self.schedules += 1
            if found := wrong(program, number):
                self.found = found
                self._tell(program, number)

    def _tell(self, program: Program, number: int) -> None:
        print(
            f"=== program {self.programs}, schedule {self.schedules}, {time.monotonic() - self.begun:.0f} s"
        )
        print("\n".join(self.found[:4]))
        wanted = kinds(self.found)
        same = lambda candidate: not wanted.isdisjoint(kinds(wrong(candidate, number)))  # noqa: E731  # what it says
        small = reduced(program, same, REDUCING_SECONDS) if REDUCING_SECONDS else program
        print(f"--- smaller:\n{script(small, number)}", flush=True)


def wrong(program: Program, number: int) -> list[str]:
    """What is wrong with the program in this order; every other one goes by priorities."""
    try:
        found, _ = complaints(program, number, schedule=schedule(number), real_seconds=REAL_SECONDS)
    except TimeoutError as error:
        return [f"[hang] {error}"]
    return found


def schedule(number: int) -> RandomWalk | PCT:
    """That of this seed."""
    return PCT() if number % 2 else RandomWalk()


def main() -> int:
    """Explore, and fail if something was found."""
    warnings.simplefilter("ignore", ac.UnawaitedWorkWarning)
    seconds, *sizes = sys.argv[1:]
    ranks = [int(size) for size in sizes[0].split(",")] if sizes else [2, 3, 2, 3, 5]
    number = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"seed {number}", flush=True)
    exploration = Exploration(float(seconds))
    while not exploration.over:
        for size in ranks:
            _round(exploration, size, number)
            number += 1
    took = time.monotonic() - exploration.begun
    print(f"{exploration.schedules} schedules of {exploration.programs} programs in {took:.0f} s", flush=True)
    if not exploration.found:
        print("nothing was found")
    return 1 if exploration.found else 0


def _round(exploration: Exploration, size: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=50,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(size))
    def one(program: Program) -> None:
        exploration.look_at(program)

    one()


if __name__ == "__main__":
    sys.exit(main())

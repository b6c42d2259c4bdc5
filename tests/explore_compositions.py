"""Draws programs for a given time, and reports how many there were and what was found.

``python tests/explore_compositions.py SECONDS [RANKS,RANKS...]``; the backend is that of the tests
(``ASYNCCOLL_TEST_BACKENDS``); the seed is random and printed (``SEED`` repeats one). ``AVOID`` lists words,
separated by commas: programs that contain one are skipped, e.g. because of known faults. ``STOP`` is a
pattern: the exploration ends once a fault matches it.
"""

from __future__ import annotations

import collections
import os
import random
import re
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

import worlds
from compositions import Program
from compositions_drawn import programs
from compositions_tried import complaints, has_messages, kinds, report

#: Seconds for reducing a program that failed in a new way.
REDUCING_SECONDS = float(os.environ.get("REDUCING", "60"))
STOP = os.environ.get("STOP", "")
AVOID = [word for word in os.environ.get("AVOID", "").split(",") if word]


class Exploration:
    """The programs drawn so far, and the faults found."""

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.backend = worlds.BACKENDS[0]
        self.drawn: collections.Counter[int] = collections.Counter()
        self.found: collections.Counter[str] = collections.Counter()
        self.first: dict[str, str] = {}
        self._seen: set[Program] = set()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def look_at(self, program: Program) -> None:
        text = program.to_json()
        if self.over or program in self._seen or any(word in text for word in AVOID):
            return
        self._seen.add(program)
        self.drawn[program.ranks] += 1
        if found := complaints(program, self.backend):
            self._note(program, found)

    def _note(self, program: Program, found: list[str]) -> None:
        what = " ".join(sorted(kinds(found)))
        self.found[what] += 1
        _say(f"=== program {self.drawn.total()}, {self.seconds:.0f} s: {what}\n{program.to_json()}")
        for one in found[:4]:
            _say(f"    {one[:1500]}")
        if STOP and re.search(STOP, " ".join(found)):
            self.deadline = 0.0
        if what not in self.first:
            self.first[what] = f"program {self.drawn.total()}, {self.seconds:.0f} s"
            if REDUCING_SECONDS:
                _say(f"--- smaller:\n{report(program, found, self.backend, REDUCING_SECONDS)}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def tell(self) -> None:
        took = f"{self.seconds:.0f} s on {self.backend}"
        _say(f"{self.drawn.total()} programs in {took}, by ranks: {dict(self.drawn)}")
        for what, count in self.found.most_common():
            _say(f"    {count} times: {what}; first: {self.first[what]}")
        if not self.found:
            _say("    nothing was found")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Explore, and return 1 if something was found."""
    seconds, *sizes = sys.argv[1:]
    ranks = [int(size) for size in sizes[0].split(",")] if sizes else [2, 2, 3, 1, 5, 2, 3, 4]
    number = int(os.environ.get("SEED", random.randrange(2**32)))
    _say(f"seed {number}")
    exploration = Exploration(float(seconds))
    try:
        while not exploration.over:
            for size in ranks:
                _round(exploration, size, number)
                number += 1
    finally:
        exploration.tell()
        worlds.close_all()
    return 1 if exploration.found else 0


def _round(exploration: Exploration, size: int, number: int) -> None:
    """Try a hundred programs on ``size`` ranks."""

    @seed(number)
    @settings(
        max_examples=100,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(size, has_messages(exploration.backend)))
    def one(program: Program) -> None:
        exploration.look_at(program)

    one()


if __name__ == "__main__":
    sys.exit(main())

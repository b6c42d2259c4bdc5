"""Draws programs and orders for as long as it is told, in simulated worlds, and tells what it found.

``python tests/explore_simulated.py SECONDS [RANKS,RANKS...]``; the seed is drawn and said (``SEED`` repeats
one). ``SCHEDULES`` orders of each program are tried, on the transports in ``TRANSPORTS`` in turn, every third
with a fault of those in ``FAULTS``, every fourth in two worlds one after the other, some without warnings.
``STATEMENTS`` are modules before whose statements others may go on, too; ``each``: every eighth with one of
ours. ``JOBS`` processes do it at once. What is found is made smaller, and said as a script that replays it.
``STATE`` is a file in which stands how far it is, and from which it goes on; ``MOST`` ends it after so many
schedules.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

import asynccoll as ac
from asynccoll.testing import PCT, Fault, RandomWalk, Report, drawn_faults
from compositions import Program
from compositions_drawn import OPERATIONS, bursts, programs
from compositions_reduced import reduced
from compositions_tried import kinds
from patience import patient
from simulated import complaints, script, unwaited

SCHEDULES = int(os.environ.get("SCHEDULES", "12"))
TRANSPORTS = tuple(os.environ.get("TRANSPORTS", "gloo,mpi,memory,horovod,gloo,xla,memory,nccl").split(","))
FAULTS = tuple(
    os.environ.get("FAULTS", "kill,silence,stop,stall,delay,cancel,interrupt,store,collect,fail").split(",")
)
STATEMENTS = tuple(name for name in os.environ.get("STATEMENTS", "").split(",") if name)
#: Those of ours in which threads meet, and what memory several ranks read.
_OURS = tuple(
    f"asynccoll.{name}"
    for name in (
        "backends.memory.moving", "flight.headers", "flight.recorder", "health.compared",
        "health.confirming", "health.refusals", "health.watchdog", "host.store", "order.connection",
        "order.halting", "order.lane", "order.queue", "order.stepping", "transport.completion",
        "transport.progress", "waiting.children", "waiting.suspending", "waiting.work",
        "world.context", "world.group",
    )
)  # fmt: skip
#: Whether ranks are on several nodes in some orders.
SPREAD = True
#: Seconds for making one smaller that failed.
REDUCING_SECONDS = float(os.environ.get("REDUCING", "60"))
REAL_SECONDS = patient(60)
_TOLD_EVERY_SECONDS = 60.0
#: When a fault strikes: after the world was joined, and before most programs are over.
_STRIKES_SECONDS = (1e-3, 8e-3)
#: Programs of one seed. Of more, most would be made of those before: half as many calls are different ones.
_EACH_SEED = 12
#: Of so many seeds one draws bursts, fewer programs, since they are longer.
_BURSTS_EVERY = 4
_BURSTS_EACH_SEED = 4
_MESSAGES = {one for one in OPERATIONS if "message" in one}
_DIFFERING = {one for one in OPERATIONS if one.startswith("differing")}
#: What the backends that a transport stands for do not carry: messages; of nccl all that gloo, which is
#: beside it, does; and calls that differ, where nothing but the memory of the ranks notices it.
_NOT_CARRIED = {
    "gloo": _DIFFERING,
    "mpi": _DIFFERING,
    "horovod": _DIFFERING | _MESSAGES,
    "xla": _DIFFERING | _MESSAGES,
    "nccl": OPERATIONS.keys()
    - {"tensor", "tracked", "large", "long", "wrong", "wrong on one", "overwritten"},
}


@dataclass(frozen=True)
class Order:
    """In what order a program runs, where, and what goes wrong: all by a number."""

    number: int
    program: Program

    @property
    def transport(self) -> str:
        return TRANSPORTS[self.number % len(TRANSPORTS)]

    @property
    def faults(self) -> tuple[Fault, ...]:
        if self.number % 3 != 1 or not any(FAULTS):
            return ()
        # On nccl the host has nothing to wait for, and of a peer that is silent it hears nothing, as in life.
        kinds = [kind for kind in FAULTS if self.transport != "nccl" or kind != "silence"]
        if self.program.loop == "none":  # there is no task that could be cancelled
            kinds = [kind for kind in kinds if kind != "cancel"]
        if not kinds:
            return ()
        chance = random.Random(self.number)
        found = drawn_faults(*kinds)(chance, self.program.ranks)
        if self.number // 3 % 2:  # not when a call is made: while it is waited for, or in between
            least, most = _STRIKES_SECONDS
            found = [replace(one, after_call=None, at=chance.uniform(least, most)) for one in found]
        return tuple(found)

    @property
    def nodes(self) -> int:
        """Each rank on a node of its own, two on each, or all on one."""
        every = self.program.ranks
        if not SPREAD or any(call.payload in _DIFFERING for call in self.program.calls):
            return 1
        return {2: every, 5: every // 2 if every % 2 == 0 else every}.get(self.number % 7, 1)

    @property
    def statements(self) -> tuple[str, ...]:
        """In every eighth order one of ours in turn, where ``STATEMENTS`` says so."""
        if STATEMENTS != ("each",):
            return STATEMENTS
        return (_OURS[self.number // 8 % len(_OURS)],) if self.number % 8 == 6 else ()

    @property
    def options(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "nodes": self.nodes,
            "faults": self.faults,
            "schedule": PCT(max(3, len(self.program.calls) // 2)) if self.number % 2 else RandomWalk(),
            "again": self.number % 4 == 2,
            "warned": self.number % 11 > 3,
            "check": "full" if self.number % 5 == 3 else "local",
            "statements": self.statements,
            "real_seconds": REAL_SECONDS,
        }

    def run(self) -> tuple[list[str], Report]:
        """What is wrong, and what became of the simulation."""
        program = self.program
        if self.transport == "nccl":  # who waits for a device holds its thread: nobody is cancelled meanwhile
            program = unwaited(program)
        return complaints(program, self.number, **self.options)


def is_carried(program: Program, transport: str) -> bool:
    """Whether all of the program can be run there."""
    return _NOT_CARRIED.get(transport, set()).isdisjoint(call.payload for call in program.calls)


def wrong(program: Program, number: int) -> list[str]:
    """What is wrong with the program, which its transport carries, in the order of this number."""
    order = Order(number, program)
    try:
        found, _ = order.run()
    except TimeoutError as error:
        return [f"[hang] {error}"]
    return [f"{one}\n  ({order.transport}, {order.faults})" for one in found]


class Exploration:
    """What was tried so far, and what was found."""

    def __init__(
        self, seconds: float, most: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """For so long by ``clock``, and so many schedules."""
        self._clock = clock
        self.begun = self._told = clock()
        self.deadline = self.begun + seconds
        self._most = most
        self.programs = self.schedules = 0
        self.found: list[str] = []

    @property
    def over(self) -> bool:
        return bool(self.found) or self.schedules >= self._most or self._clock() > self.deadline

    def keep(self, state: Path, number: int) -> None:
        """Note down how far it is: a round begins, with the seed ``number``."""
        beside = state.with_suffix(".new")
        kept = {"programs": self.programs, "schedules": self.schedules, "number": number}
        beside.write_text(json.dumps(kept | {"seconds": self._clock() - self.begun}))
        beside.replace(state)  # at once, or not at all: it may be ended at any moment

    def resume(self, state: Path) -> int:
        """Go on from what was noted down there; the next seed."""
        kept: dict[str, Any] = json.loads(state.read_text())
        self.programs, self.schedules = kept["programs"], kept["schedules"]
        self.begun -= kept["seconds"]
        return int(kept["number"])

    def explore(self, ranks: Sequence[int], number: int, state: Path | None = None) -> None:
        """Programs on these many ranks in turn, a dozen from each seed, of which the first is ``number``.

        How far it is stands in ``state`` after each seed, if there is such a file to be.
        """
        while not self.over:
            for size in ranks:
                self.round(size, number)
                number += 1
                if state is not None and not self.over:
                    self.keep(state, number)
                if self._clock() - self._told > _TOLD_EVERY_SECONDS:
                    self._told = self._clock()
                    print(f"{self}; to go on from here: SEED={number}", flush=True)

    def round(self, size: int, number: int) -> None:
        """At most a dozen programs on so many ranks, drawn from this seed."""
        for program in drawn(size, number):
            self.look_at(program)

    def __str__(self) -> str:
        return f"{self.schedules} schedules of {self.programs} programs in {self._clock() - self.begun:.0f} s"

    def look_at(self, program: Program) -> None:
        if self.over:
            return
        first = self.programs * SCHEDULES
        self.programs += 1
        for number in range(first, first + SCHEDULES):
            if self.over:
                return
            if not is_carried(program, Order(number, program).transport):
                continue  # nothing is tried, and nothing counted
            self.schedules += 1
            if found := wrong(program, number):
                self.found = found
                self._tell(program, number)

    def _tell(self, program: Program, number: int) -> None:
        print(f"=== program {self.programs}, schedule {self.schedules}, {self._clock() - self.begun:.0f} s")
        print("\n".join(self.found[:4]))
        wanted = kinds(self.found)
        same = lambda candidate: not wanted.isdisjoint(kinds(wrong(candidate, number)))  # noqa: E731  # what it says
        small = reduced(program, same, REDUCING_SECONDS) if REDUCING_SECONDS else program
        print(f"--- smaller:\n{script(small, number)}", flush=True)


def main() -> int:
    """Explore, and fail if something was found."""
    warnings.simplefilter("ignore", ac.UnawaitedWorkWarning)
    seconds, *sizes = sys.argv[1:]
    jobs = int(os.environ.get("JOBS", "1"))
    number = int(os.environ.get("SEED", random.randrange(2**32)))
    if jobs > 1:
        return _at_once(jobs, number)
    ranks = [int(size) for size in sizes[0].split(",")] if sizes else [2, 3, 2, 3, 5]
    print(f"seed {number}", flush=True)
    exploration = Exploration(float(seconds), float(os.environ.get("MOST", "inf")))
    state = Path(os.environ["STATE"]) if os.environ.get("STATE") else None
    if state is not None and state.exists():
        number = exploration.resume(state)
        print(f"{exploration} before; it goes on with seed {number}", flush=True)
    exploration.explore(ranks, number, state)
    print(exploration, flush=True)
    if not exploration.found:
        print("nothing was found")
    return 1 if exploration.found else 0


def _at_once(jobs: int, number: int) -> int:
    """So many of these, each with seeds of its own; what they found."""
    seeds = [str(number + 1_000_000 * job) for job in range(jobs)]
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen(command, env=os.environ | {"JOBS": "1", "SEED": one}) for one in seeds]
    return max([one.wait() for one in running])


def drawn(size: int, number: int, *, in_bursts: bool | None = None) -> list[Program]:
    """At most a dozen programs on so many ranks, each once, from this seed; bursts of some, unless said."""
    if number % _BURSTS_EVERY == 0 if in_bursts is None else in_bursts:
        chance = random.Random(f"{size} {number}")
        return [bursts(chance, size) for _ in range(_BURSTS_EACH_SEED)]
    found: dict[Program, None] = {}

    @seed(number)
    @settings(
        max_examples=_EACH_SEED,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(size, simulated=True))
    def one(program: Program) -> None:
        found[program] = None

    one()
    return list(found)


if __name__ == "__main__":
    sys.exit(main())

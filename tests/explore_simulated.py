"""Draws programs and orders for simulated worlds, for a given time, and reports what was found.

``python tests/explore_simulated.py SECONDS [RANKS,RANKS...]``; the seed is random and printed (``SEED``
repeats one). ``SCHEDULES`` orders of each program are tried, on the transports in ``TRANSPORTS`` in turn:
every third with a fault from ``FAULTS``, every fourth in two consecutive worlds, some without warnings.
``STATEMENTS`` lists modules before whose statements the scheduler may switch threads, too; ``each``: every
eighth order does so in one of ours. ``JOBS`` processes explore concurrently. A failing program is reduced,
and printed as a script that replays it. ``STATE`` is a file that records the progress, from which a later run
resumes; ``MOST`` ends the exploration after so many schedules.
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
#: Our modules in which threads interact, or which access memory that several ranks read.
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
#: Whether some orders spread the ranks over several nodes.
SPREAD = True
#: Seconds for reducing a program that failed.
REDUCING_SECONDS = float(os.environ.get("REDUCING", "60"))
REAL_SECONDS = patient(60)
_TOLD_EVERY_SECONDS = 60.0
#: When a fault strikes: after the ranks have joined, and before most programs have ended.
_STRIKES_SECONDS = (1e-3, 8e-3)
#: Programs per seed. Most of any further ones would be variations of earlier ones, with half as many new
#: calls.
_EACH_SEED = 12
#: One in so many seeds draws bursts: fewer programs, since they are longer.
_BURSTS_EVERY = 4
_BURSTS_EACH_SEED = 4
_MESSAGES = {one for one in OPERATIONS if "message" in one}
_DIFFERING = {one for one in OPERATIONS if one.startswith("differing")}
#: The payloads that the backend of a transport cannot carry: messages; for nccl, everything that gloo carries
#: in its place; and differing calls, which only the shared memory of the ranks reveals.
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
    """The schedule, the transport and the faults of a program's run, all derived from a number."""

    number: int
    program: Program

    @property
    def transport(self) -> str:
        return TRANSPORTS[self.number % len(TRANSPORTS)]

    @property
    def faults(self) -> tuple[Fault, ...]:
        if self.number % 3 != 1 or not any(FAULTS):
            return ()
        # On nccl the host waits for nothing, so it does not notice a silent peer, as on real nccl.
        kinds = [kind for kind in FAULTS if self.transport != "nccl" or kind != "silence"]
        if self.program.loop == "none":  # there is no task to cancel
            kinds = [kind for kind in kinds if kind != "cancel"]
        if not kinds:
            return ()
        chance = random.Random(self.number)
        found = drawn_faults(*kinds)(chance, self.program.ranks)
        if self.number // 3 % 2:  # not at a call, but while it is waited for or between calls
            least, most = _STRIKES_SECONDS
            found = [replace(one, after_call=None, at=chance.uniform(least, most)) for one in found]
        return tuple(found)

    @property
    def nodes(self) -> int:
        """The number of nodes: one per rank, one per two ranks, or one in all."""
        every = self.program.ranks
        if not SPREAD or any(call.payload in _DIFFERING for call in self.program.calls):
            return 1
        return {2: every, 5: every // 2 if every % 2 == 0 else every}.get(self.number % 7, 1)

    @property
    def statements(self) -> tuple[str, ...]:
        """The modules to switch threads in; for ``STATEMENTS=each``, one of ours in every eighth order."""
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
        """Run the program. Returns what was wrong, and the report of the simulation."""
        program = self.program
        if self.transport == "nccl":  # waiting for a device blocks the thread, so no cancellation can arrive
            program = unwaited(program)
        return complaints(program, self.number, **self.options)


def is_carried(program: Program, transport: str) -> bool:
    """Whether ``transport`` can carry the whole program."""
    return _NOT_CARRIED.get(transport, set()).isdisjoint(call.payload for call in program.calls)


def wrong(program: Program, number: int) -> list[str]:
    """Return what is wrong with the program in the order of this number, whose transport can carry it."""
    order = Order(number, program)
    try:
        found, _ = order.run()
    except TimeoutError as error:
        return [f"[hang] {error}"]
    return [f"{one}\n  ({order.transport}, {order.faults})" for one in found]


class Exploration:
    """The schedules tried so far, and the faults found."""

    def __init__(
        self, seconds: float, most: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Explore for ``seconds`` by ``clock``, and at most ``most`` schedules."""
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
        """Record the progress at the beginning of a round with the seed ``number``."""
        beside = state.with_suffix(".new")
        kept = {"programs": self.programs, "schedules": self.schedules, "number": number}
        beside.write_text(json.dumps(kept | {"seconds": self._clock() - self.begun}))
        beside.replace(state)  # atomically, since this process may be killed at any moment

    def resume(self, state: Path) -> int:
        """Resume from the progress recorded in ``state``. Returns the next seed."""
        kept: dict[str, Any] = json.loads(state.read_text())
        self.programs, self.schedules = kept["programs"], kept["schedules"]
        self.begun -= kept["seconds"]
        return int(kept["number"])

    def explore(self, ranks: Sequence[int], number: int, state: Path | None = None) -> None:
        """Try a dozen programs of each seed from ``number`` on, on each of these numbers of ranks in turn.

        The progress is recorded in ``state`` after each seed, if that is given.
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
        """Try at most a dozen programs on ``size`` ranks, drawn from this seed."""
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
                continue  # not tried, and not counted
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
    """Explore, and return 1 if something was found."""
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
    """Run ``jobs`` explorations concurrently, each with its own seeds. Returns 1 if one found something."""
    seeds = [str(number + 1_000_000 * job) for job in range(jobs)]
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen(command, env=os.environ | {"JOBS": "1", "SEED": one}) for one in seeds]
    return max([one.wait() for one in running])


def drawn(size: int, number: int, *, in_bursts: bool | None = None) -> list[Program]:
    """Return at most a dozen distinct programs on ``size`` ranks, or bursts (by default, some seeds')."""
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

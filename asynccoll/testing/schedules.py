"""Schedules, which choose the next thread: a random walk, random priorities, or the replay of a run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from asynccoll.host.misfits import check, check_count
from asynccoll.testing.threads import SimulatedThread

__all__ = ["PCT", "RandomWalk", "Replay"]

#: After this many steps in a row, a thread is taken to poll for something that another one has to do.
_MOST_ALONE = 1000
_LEAST_STEPS, _MOST_STEPS = 50, 20_000


@dataclass
class RandomWalk:
    """At each switch point, switches with this ``probability`` to any runnable thread, all equally likely."""

    probability: float = 0.1
    #: the same before a statement, in ``statements`` of ``simulate``
    at_statements: float = 0.05

    def begin(self, chance: random.Random) -> None:
        """Do nothing: there is no state."""

    def stays(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        return chance.random() >= self.probability

    def stays_at_statement(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        return chance.random() >= self.at_statements

    def pick(self, runnable: list[SimulatedThread], turn: int, chance: random.Random) -> SimulatedThread:
        return runnable[int(chance.random() * len(runnable))]

    def gave_way(self, thread: SimulatedThread) -> None:
        """Do nothing: all threads are equal."""


@dataclass
class PCT:
    """Runs the thread of highest random priority; at ``depth - 1`` random steps it drops to the lowest.

    A thread that yields drops, too, so that none starves. A bug that needs ``depth`` orderings of steps is
    found with a known probability.

    Source: Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, 2010.
    """

    depth: int = 3
    #: roughly how many steps there will be; by default drawn log-uniformly from a wide range
    steps: int | None = None

    def __post_init__(self) -> None:
        check_count("depth of PCT", self.depth)
        if self.steps is not None:
            check_count("steps of PCT", self.steps)

    _priorities: dict[SimulatedThread, float] = field(default_factory=dict, init=False, repr=False)
    _changes: list[int] = field(default_factory=list, init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)
    _lowest: float = field(default=0.0, init=False, repr=False)
    _latest: SimulatedThread | None = field(default=None, init=False, repr=False)
    _alone: int = field(default=0, init=False, repr=False)

    def begin(self, chance: random.Random) -> None:
        self._priorities = {}
        steps = self.steps or int(_LEAST_STEPS * (_MOST_STEPS / _LEAST_STEPS) ** chance.random())
        self._changes = sorted((chance.randrange(steps) for _ in range(self.depth - 1)), reverse=True)
        self._step, self._lowest, self._latest, self._alone = 0, 0.0, None, 0

    def stays(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        self._step += 1
        if self._changes and self._step >= self._changes[-1]:
            self._changes.pop()
            self._fall(thread)
        self._alone = self._alone + 1 if thread is self._latest else 0
        self._latest = thread
        if self._alone >= _MOST_ALONE:
            self._fall(thread)
            self._alone = 0
        return False  # ``pick`` takes the highest priority, which may be this thread's

    stays_at_statement = stays

    def pick(self, runnable: list[SimulatedThread], turn: int, chance: random.Random) -> SimulatedThread:
        for thread in runnable:
            if thread not in self._priorities:
                self._priorities[thread] = 1.0 + chance.random()
        return max(runnable, key=self._priorities.__getitem__)

    def gave_way(self, thread: SimulatedThread) -> None:
        self._fall(thread)

    def _fall(self, thread: SimulatedThread) -> None:
        self._lowest -= 1.0
        self._priorities[thread] = self._lowest


@dataclass
class Replay:
    """Replays a run from its ``Report.taken``: the turns at which a thread other than the default one ran.

    ``explore`` leaves out turns that make no difference.
    """

    taken: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check("taken of Replay", self.taken, Mapping, "a dict, as Report.taken")

    def begin(self, chance: random.Random) -> None:
        """Do nothing: all choices are in ``taken``."""

    def stays(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        return turn not in self.taken

    stays_at_statement = stays

    def pick(self, runnable: list[SimulatedThread], turn: int, chance: random.Random) -> SimulatedThread:
        number = self.taken.get(turn)
        return next((one for one in runnable if one.number == number), runnable[0])

    def gave_way(self, thread: SimulatedThread) -> None:
        """Do nothing, as above."""

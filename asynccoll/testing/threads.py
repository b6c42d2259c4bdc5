"""Simulated threads as the scheduler sees them, and the schedules that choose among them."""

from __future__ import annotations

import math
import random
import threading
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Event", "Killed", "Schedule", "SimulatedThread"]


class Event(NamedTuple):
    """Something that happened in a simulation."""

    seconds: float
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.seconds:.6f} s  rank {self.rank} {self.what}"


class Killed(BaseException):
    """Unwinds a thread whose rank is gone, or whose simulation is over; what it still does is ignored."""


@runtime_checkable
class Schedule(Protocol):
    """Decides which thread runs next. Decisions are numbered; ``turn`` is the number."""

    def begin(self, chance: random.Random) -> None:
        """Begin a simulation."""

    def stays(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        """Whether ``thread``, which is running, keeps running."""

    def stays_at_statement(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        """Like ``stays``, before a statement; there are many more of those."""

    def pick(self, runnable: list[SimulatedThread], turn: int, chance: random.Random) -> SimulatedThread:
        """Return the thread of ``runnable`` that runs next."""

    def gave_way(self, thread: SimulatedThread) -> None:
        """Note that ``thread`` yields, as it has nothing to do but to poll again."""


class SimulatedThread:
    """One thread of one rank, as the scheduler sees it."""

    __slots__ = (
        "baton",
        "ended",
        "ident",
        "interrupt",
        "joiners",
        "name",
        "number",
        "rank",
        "runnable",
        "timed_out",
        "until",
    )

    def __init__(self, rank: int, name: str, number: int) -> None:
        self.rank: int = rank
        self.name: str = name
        self.number: int = number
        self.baton: threading.Lock = threading.Lock()
        self.baton.acquire()
        self.ident: int = 0
        self.runnable: bool = True
        self.until: float = math.inf  # when it wakes if it is not woken before
        self.timed_out: bool = False
        self.ended: bool = False
        #: the exception to raise in it at its next switch point
        self.interrupt: BaseException | None = None
        self.joiners: list[SimulatedThread] = []

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.name}"

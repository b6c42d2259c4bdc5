"""A simulated thread as its scheduler sees it, and who says which one goes on."""

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
    """Unwinds a thread whose rank is gone, or whose simulation is over; nothing that it does counts."""


@runtime_checkable
class Schedule(Protocol):
    """Who is next. Every time that this is asked has a number, ``turn``."""

    def begin(self, chance: random.Random) -> None:
        """A simulation begins."""

    def stays(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        """Whether ``thread``, which could go on, does."""

    def stays_at_statement(self, thread: SimulatedThread, turn: int, chance: random.Random) -> bool:
        """The same before a statement, of which there are many more."""

    def pick(self, runnable: list[SimulatedThread], turn: int, chance: random.Random) -> SimulatedThread:
        """Which of these runs next."""

    def gave_way(self, thread: SimulatedThread) -> None:
        """It has nothing to do but to look again."""


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
        self.until: float = math.inf  # when it wakes by itself
        self.timed_out: bool = False
        self.ended: bool = False
        #: what is raised in it at its next point
        self.interrupt: BaseException | None = None
        self.joiners: list[SimulatedThread] = []

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.name}"

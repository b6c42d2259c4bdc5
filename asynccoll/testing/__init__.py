"""For tests: simulated ranks in one process, with every interleaving determined by a seed.

``world`` starts real ranks instead, and keeps them alive between tests.

This is the topmost layer: it replaces the host that the library is built on. No layer below may know of it.
"""

from asynccoll.testing.drawn import drawn_faults
from asynccoll.testing.exploration import Exploration, explore
from asynccoll.testing.faults import (
    Cancel,
    Collect,
    Delay,
    Fail,
    Fault,
    Interrupt,
    Kill,
    Stall,
    Stop,
    StoreLost,
)
from asynccoll.testing.links import Link
from asynccoll.testing.live import RankError, World, world
from asynccoll.testing.report import Report
from asynccoll.testing.schedules import PCT, RandomWalk, Replay
from asynccoll.testing.simulation import simulate
from asynccoll.testing.strays import Stray
from asynccoll.testing.threads import Event

__all__ = [
    "PCT",
    "Cancel",
    "Collect",
    "Delay",
    "Event",
    "Exploration",
    "Fail",
    "Fault",
    "Interrupt",
    "Kill",
    "Link",
    "RandomWalk",
    "RankError",
    "Replay",
    "Report",
    "Stall",
    "Stop",
    "StoreLost",
    "Stray",
    "World",
    "drawn_faults",
    "explore",
    "simulate",
    "world",
]

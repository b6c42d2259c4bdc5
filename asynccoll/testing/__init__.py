"""For tests: a world of simulated ranks in one process, of which every interleaving comes from a seed.

Above everything: it exchanges the host that the library stands on. Nothing below may know of it.
"""

from asynccoll.testing.faults import Kill
from asynccoll.testing.network import Link
from asynccoll.testing.report import Report
from asynccoll.testing.schedules import PCT, RandomWalk
from asynccoll.testing.simulation import simulate

__all__ = ["PCT", "Kill", "Link", "RandomWalk", "Report", "simulate"]

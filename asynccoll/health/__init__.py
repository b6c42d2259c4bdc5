"""What goes wrong, on which rank: who is lost, who has refused what, who called something else.

Knows lanes and the store; what to do about it is told to it by the world.
"""

from asynccoll.health.liveness import Liveness
from asynccoll.health.refusals import Refusals
from asynccoll.health.watchdog import Watch

__all__ = ["Liveness", "Refusals", "Watch"]

"""What goes wrong, on which rank: which ranks are lost, have refused a call, or called something else.

This package asks the store and other hosts, and tells lanes. It must not know backends or contexts: the world
decides which error a call then raises.
"""

from asynccoll.health.blame import Blame
from asynccoll.health.liveness import Liveness
from asynccoll.health.refusals import Refusals
from asynccoll.health.waits import Waits
from asynccoll.health.watchdog import Watch

__all__ = ["Blame", "Liveness", "Refusals", "Waits", "Watch"]

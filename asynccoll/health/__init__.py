"""What goes wrong, on which rank: who is lost, who has refused what, who called something else.

Asks the store and the other hosts, and tells lanes. Must not know backends or contexts: which error a call
then raises is the world's word.
"""

from asynccoll.health.blame import Blame
from asynccoll.health.liveness import Liveness
from asynccoll.health.refusals import Refusals
from asynccoll.health.waits import Waits
from asynccoll.health.watchdog import Watch

__all__ = ["Blame", "Liveness", "Refusals", "Waits", "Watch"]

"""One rank's world: its context, and its groups with their lanes.

Brings a backend's communicators together with lanes, refusals and liveness. Must not know how a process joins
the world, nor what is sent.
"""

from asynccoll.world.context import Context, Identity
from asynccoll.world.group import Group

__all__ = ["Context", "Group", "Identity"]

"""This rank's place: its context, and its groups with their lanes.

Holds what a backend has opened together with lanes, refusals and liveness; must not know how a process
joins it, nor what is sent.
"""

from asynccoll.world.context import Context, Identity
from asynccoll.world.group import Group

__all__ = ["Context", "Group", "Identity"]

"""This rank's place: its context, and its groups with their lanes.

Builds everything below it; must not know how a process joins it, nor what is sent.
"""

from asynccoll.world.context import Context, Identity
from asynccoll.world.group import Group

__all__ = ["Context", "Group", "Identity"]

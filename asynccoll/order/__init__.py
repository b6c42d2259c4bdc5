"""The order of operations, the same on every rank: lanes, who may issue on them, and what a refusal does.

The protocols in ``needs`` declare what this package needs of the world, such as opening a communicator or
asking which ranks are lost. The package must not know what operations mean. (Only ``costs`` issues some
itself, to measure how long they take.)
"""

from asynccoll.order.lane import Lane
from asynccoll.order.needs import Members, World
from asynccoll.order.operation import Operation

__all__ = ["Lane", "Members", "Operation", "World"]

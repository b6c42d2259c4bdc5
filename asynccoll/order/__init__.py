"""The order of operations, the same on every rank: lanes, who may issue in them, and what a refusal does.

What this package needs of the world (to open a communicator, to ask which ranks are lost) is declared by the
protocols in ``needs``. It must not know what the operations mean (only ``costs`` issues some itself, to
measure what they cost).
"""

from asynccoll.order.lane import Lane
from asynccoll.order.needs import Members, World
from asynccoll.order.operation import Operation

__all__ = ["Lane", "Members", "Operation", "World"]

"""The order of operations, the same on every rank: lanes, who may issue in them, and what a refusal does.

What it needs of the world (open a communicator, ask who is lost) stands in protocols of its own; it must
not know what the operations mean (``costs`` alone makes some, to measure what they cost).
"""

from asynccoll.order.lane import Lane
from asynccoll.order.needs import Members, World
from asynccoll.order.operation import Operation

__all__ = ["Lane", "Members", "Operation", "World"]

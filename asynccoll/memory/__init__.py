"""Which tensors may be sent or filled, which share memory, and which an earlier call is still filling.

Also new memory for results, and reductions with torch. This package knows tensors and the calls that fill
them, but not how they are filled or by which backend.
"""

from asynccoll.memory.aliasing import Claim, has_memory, may_overlap
from asynccoll.memory.arithmetic import reduce_chunks
from asynccoll.memory.fresh import fresh
from asynccoll.memory.plain import plain_tensor
from asynccoll.memory.unfilled import claims, refuse_unfilled

__all__ = [
    "Claim",
    "claims",
    "fresh",
    "has_memory",
    "may_overlap",
    "plain_tensor",
    "reduce_chunks",
    "refuse_unfilled",
]

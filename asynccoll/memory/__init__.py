"""Which tensors may be sent and filled, which share memory, what an earlier call fills; their reductions.

Knows tensors and who is to fill them; not how, nor over which backend.
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

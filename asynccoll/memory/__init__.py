"""Which tensors may be sent and filled, which share memory, and what an earlier call still fills.

Knows tensors, not what is done with them.
"""

from asynccoll.memory.aliasing import Claim, has_memory, may_overlap
from asynccoll.memory.plain import plain_tensor
from asynccoll.memory.unfilled import claims, refuse_unfilled

__all__ = ["Claim", "claims", "has_memory", "may_overlap", "plain_tensor", "refuse_unfilled"]

"""One collective over whatever a user passes: a tensor, a number, a string, a tree of these.

Validates, dispatches by kind of payload, and puts trees back together. Must not know how a
tensor is encoded, nor which backend sends it. Roots and pairs are global ranks here, and indices in the
group from here on.
"""

from asynccoll.payload.exchanging import all_to_all, permute, recv, refuse_message, send
from asynccoll.payload.gathering import all_gather, gather
from asynccoll.payload.reducing import all_reduce, reduce, reduce_scatter
from asynccoll.payload.scaling import all_reduce_scaled
from asynccoll.payload.spreading import broadcast, scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_scaled",
    "all_to_all",
    "broadcast",
    "gather",
    "permute",
    "recv",
    "reduce",
    "reduce_scatter",
    "refuse_message",
    "scatter",
    "send",
]

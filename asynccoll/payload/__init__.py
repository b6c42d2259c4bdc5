"""One collective over whatever a user passes: a tensor, a number, a string, a tree of these.

This package validates the payload, dispatches by its kind, and puts trees back together. It must not know
how a tensor is encoded, nor which backend sends it. Its functions take roots and pairs as global ranks, and
pass indices in the group to the layers below.
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

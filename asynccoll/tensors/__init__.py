"""Collectives of one tensor: plan, encode, issue; decode at the waiter.

Each ``start_*`` function gives a ``Work`` for the whole result, in a canonical layout (ranks are rows).
Nothing here is differentiable (``autograd`` wraps it), validates what the public functions have
validated, or knows which backend runs it. Roots are indices in the group.
"""

from asynccoll.tensors.common import Call, check_out, deliver, plan_for
from asynccoll.tensors.exchanging import all_to_all_call, start_all_to_all, start_permute
from asynccoll.tensors.fusing import fused
from asynccoll.tensors.messaging import refuse_message, start_recv, start_send
from asynccoll.tensors.moving import (
    all_gather_call,
    broadcast_call,
    broadcast_fuse,
    start_all_gather,
    start_barrier,
    start_broadcast,
    start_gather,
    start_join,
)
from asynccoll.tensors.reducing import (
    all_reduce_call,
    all_reduce_fuse,
    reduce_scatter_call,
    start_all_reduce,
    start_reduce,
    start_reduce_scatter,
)

__all__ = [
    "Call",
    "all_gather_call",
    "all_reduce_call",
    "all_reduce_fuse",
    "all_to_all_call",
    "broadcast_call",
    "broadcast_fuse",
    "check_out",
    "deliver",
    "fused",
    "plan_for",
    "reduce_scatter_call",
    "refuse_message",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_barrier",
    "start_broadcast",
    "start_gather",
    "start_join",
    "start_permute",
    "start_recv",
    "start_reduce",
    "start_reduce_scatter",
    "start_send",
]

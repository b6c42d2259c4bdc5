"""Collectives of tensors, one or many as few: plan, encode; decode at the waiter.

Each ``*_call`` function gives a ``Call`` for the whole result, in a canonical layout (ranks are rows), which
is begun, kept and begun again, or made a part of a program. ``autograd`` alone makes them differentiable.
Must not validate what ``payload`` has validated, nor know which backend runs it. Roots are indices in the
group.
"""

from asynccoll.tensors.common import Call, check_out, deliver, plan_for
from asynccoll.tensors.exchanging import all_to_all_call, permute_call
from asynccoll.tensors.fusing import fused
from asynccoll.tensors.messaging import refuse_message, start_recv, start_send
from asynccoll.tensors.moving import (
    all_gather_call,
    broadcast_call,
    broadcast_fuse,
    gather_call,
    start_barrier,
    start_join,
)
from asynccoll.tensors.reducing import (
    all_reduce_call,
    all_reduce_fuse,
    reduce_call,
    reduce_scatter_call,
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
    "gather_call",
    "permute_call",
    "plan_for",
    "reduce_call",
    "reduce_scatter_call",
    "refuse_message",
    "start_barrier",
    "start_join",
    "start_recv",
    "start_send",
]

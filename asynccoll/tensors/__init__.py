"""Collectives of one tensor, or of many fused into few: plan, encode, and decode in the waiter.

Each ``*_call`` function returns a ``Call`` for the whole result in a canonical layout (ranks are rows). It is
started once, kept and started again, or made a part of a program. Only ``autograd`` makes calls
differentiable. This package must not validate what ``payload`` has validated, nor know which backend runs a
call. Roots are indices in the group.
"""

from asynccoll.tensors.common import Call, check_out, deliver, plan_for
from asynccoll.tensors.exchanging import all_to_all_call, permute_call, refuse_message, start_recv, start_send
from asynccoll.tensors.fusing import fused
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

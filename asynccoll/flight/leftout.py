"""Advice for when a rank has skipped a call that a helper of this library makes, chosen by its lane's name.

The rank that waits, the ranks that continue, and readers of the recordings all get the same advice.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Part of the names of lanes on which the state of a sharded model or optimizer is gathered, on every rank.
FULL_STATE = "/full_state"
#: Part of the names of lanes on which backward sends: see ``ops.scopes.backward_lane``.
OF_BACKWARD = "/backward"
_ON_EVERY_RANK = (
    "the whole state is gathered from all ranks: call full_state_dict() (or full_optimizer_state()) on every "
    "rank, and only save what it returns under `if rank == 0`"
)


def advice(lanes: Iterable[str]) -> str:
    """Say what to do about missing calls on one of these lanes; "" if the names give no hint."""
    return _ON_EVERY_RANK if any(FULL_STATE in lane for lane in lanes) else ""


def reason(lane: str) -> str:
    """Say why a rank may have made no call on this lane, and what to do about it."""
    if told := advice([lane]):
        return told
    if OF_BACKWARD in lane:
        return (
            "backward() makes the calls there: run it on every rank, on inputs that require grad on all "
            "or on none"
        )
    return "every rank has to make each call (is this one under `if rank == 0`?)"

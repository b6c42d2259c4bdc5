"""What to do where a rank has left out a call that a helper of ours makes: its lane's name tells which.

The rank that waits, the ranks that go on, and who reads the recordings later all get the same advice.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["FULL_STATE", "advice"]

#: In the names of lanes on which the state of something sharded is gathered, on every rank.
FULL_STATE = "/full_state"
_ON_EVERY_RANK = (
    "the whole state is gathered from all ranks: call full_state_dict() (or full_optimizer_state()) on every "
    "rank, and only save what it returns under `if rank == 0`"
)


def advice(lanes: Iterable[str]) -> str:
    """What to do about calls on one of these that are missing; "" if the names tell nothing."""
    return _ON_EVERY_RANK if any(FULL_STATE in lane for lane in lanes) else ""

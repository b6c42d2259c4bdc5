"""How the host waits until the device has done what is ordered by its streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from asynccoll import host
from asynccoll.transport import streams
from asynccoll.transport.completion import Promise
from asynccoll.transport.waiters import Waiters

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation

__all__ = ["landing"]

_waiter = host.per_process(lambda: Waiters("asynccoll-stream"))


def landing(operations: Sequence[Operation], device: torch.device) -> Operation | None:
    """What is over once the device has done all that its current stream holds now; None if it has.

    It has the time limit of the last of ``operations`` and ends with it: by the loss of a peer, say.
    """
    event = streams.marked(device)
    landed = Promise()
    try:
        if event.query():
            return None
    except RuntimeError as error:  # what any kernel failed with
        landed.settle(error)
    else:
        _waiter.submit(event, lambda: _wait(event, landed))
    return operations[-1].lane.follow_up(operations[-1], "on_host", landed)


def _wait(event: Any, landed: Promise) -> None:
    # A blocking event sleeps in the driver: no spinning, and the GIL is free.
    try:
        event.synchronize()
    except RuntimeError as error:  # as above
        landed.settle(error)
    else:
        landed.settle()

"""How the host waits for a device stream: ``stream.synchronize()``, as an operation that can be awaited.

The wait blocks a thread of its own, so it holds up no event loop. Being an operation, it has a time limit and
ends if a peer is lost, for whose data a kernel might wait for ever.
"""

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

__all__ = ["synchronized"]

_waiters = host.per_process(lambda: Waiters("asynccoll-stream"))


def synchronized(operations: Sequence[Operation], device: torch.device) -> Operation | None:
    """Return an operation that ends when the device has done all work now on its current stream.

    Returns None if the device has done so already. The time limit is that of the last of ``operations``, and
    what ends that one's lane ends the new operation as well.
    """
    event = streams.recorded(device)
    done = Promise()
    try:
        if event.query():
            return None
    except RuntimeError as error:  # from an earlier kernel: CUDA reports its errors at a later call
        done.settle(error)
    else:
        _waiters.submit(event, lambda: _wait(event, done))  # each its own key: waits run side by side
    return operations[-1].lane.follow_up(operations[-1], "on_host", done)


def _wait(event: Any, done: Promise) -> None:
    # A blocking event sleeps in the driver: no spinning, and the GIL is free.
    try:
        event.synchronize()
    except RuntimeError as error:  # from a kernel, as above
        done.settle(error)
    else:
        done.settle()

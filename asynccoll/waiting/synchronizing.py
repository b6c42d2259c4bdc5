"""How the host waits for a device stream: ``stream.synchronize()`` as an operation that can be awaited.

The wait blocks a separate thread, so it does not block an event loop. As an operation, it has a timeout, and
ends if a peer is lost whose data a kernel would otherwise wait for forever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asynccoll import host
from asynccoll.order.operation import Operation
from asynccoll.transport import streams
from asynccoll.transport.completion import Promise
from asynccoll.transport.waiters import Waiters

__all__ = ["synchronized"]

_waiters = host.per_process(lambda: Waiters("asynccoll-stream"))


def synchronized(operations: Sequence[Operation], device: torch.device) -> Operation | None:
    """Return an operation that ends when the device has completed all work now on its current stream.

    Returns None if that work is already complete. The new operation has the time limit of the last of
    ``operations``, and whatever ends that operation's lane also ends the new operation.
    """
    event = streams.recorded(device)
    done = Promise()
    try:
        if event.query():
            return None
    except RuntimeError as error:  # from an earlier kernel: CUDA reports its errors in a later call
        done.settle(error)
    else:
        # A key for each event: waits run concurrently. Waiting for a blocking event sleeps in the driver,
        # without spinning and with the GIL released.
        _waiters.run(event, event.synchronize, done)
    return operations[-1].lane.follow_up(operations[-1], "on_host", done)

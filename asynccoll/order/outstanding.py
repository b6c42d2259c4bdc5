"""The operations of a lane that are in flight: issued or queued, and possibly still using their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from asynccoll import host
from asynccoll.order.operation import Operation


class Outstanding:
    """One lane's collectives, which complete in order, and its other operations, which complete at any time.

    The others are messages, and failed operations whose memory native code may still write to. The lane holds
    its lock around each call.
    """

    def __init__(self) -> None:
        self.collectives: deque[Operation] = deque()
        self._apart: list[Operation] = []

    def __iter__(self) -> Iterator[Operation]:
        """Yield the collectives in order, then the others; some may be over."""
        yield from self.collectives
        yield from self._apart

    def add(self, operation: Operation) -> None:
        """Add an accepted collective, and forget the earlier ones that are over."""
        collectives = self.collectives
        while collectives and ((first := collectives[0]).over or first.completion.landed() or first.failure):
            collectives.popleft()
            if first.failure is not None:
                self.add_apart(first)
            elif not first.over:
                first.lane.world.recorder.ended(first.ticket, host.monotonic())  # no waiter has seen its end
        collectives.append(operation)

    def add_apart(self, operation: Operation) -> None:
        """Add an operation outside the order of collectives, to keep its memory until it has landed."""
        self._apart = [one for one in self._apart if one.holds_memory()]
        self._apart.append(operation)

    def using_memory(self) -> list[Operation]:
        """Return the operations whose memory may still be read or written."""
        return [operation for operation in self if not operation.landed()]

    def clear(self) -> None:
        """Forget all operations: they refer to native works, which would keep the connections open."""
        self.collectives.clear()
        self._apart.clear()

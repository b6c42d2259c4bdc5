"""The operations of a lane that are in flight: issued or queued, and perhaps still using their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asynccoll import host

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation

__all__ = ["Outstanding"]


class Outstanding:
    """Collectives, which complete in order, and the rest, which completes at any time.

    These are messages, and operations given up, to whose memory native code may still write. The lane holds
    its lock around each call.
    """

    def __init__(self) -> None:
        self.collectives: deque[Operation] = deque()
        self._apart: list[Operation] = []

    def __iter__(self) -> Iterator[Operation]:
        """Collectives in order, then the others; some may be over."""
        yield from self.collectives
        yield from self._apart

    def add(self, operation: Operation) -> None:
        """A collective was accepted. Those before it that are over are forgotten."""
        collectives = self.collectives
        while collectives and ((first := collectives[0]).over or first.completion.landed() or first.failure):
            collectives.popleft()
            if first.failure is not None:
                self.add_apart(first)
            elif not first.over:
                first.lane.world.recorder.ended(first.ticket, host.monotonic())  # nobody has seen it
        collectives.append(operation)

    def add_apart(self, operation: Operation) -> None:
        """Hold on to its memory, out of the others' way."""
        self._apart = [one for one in self._apart if not one.completion.landed()]
        self._apart.append(operation)

    def using_memory(self) -> list[Operation]:
        """Those whose memory may still be read or filled."""
        return [operation for operation in self if not operation.landed()]

    def clear(self) -> None:
        """Let go of them: they hold native works, and those the connections."""
        self.collectives.clear()
        self._apart.clear()

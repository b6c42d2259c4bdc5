"""What a lane queues: one native call, or a program of several that depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from typing import TYPE_CHECKING

from asynccoll.errors import UnsupportedOpError
from asynccoll.host.call_site import NOWHERE, Spot
from asynccoll.order.stepping import Stepping
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise
from asynccoll.transport.streams import current

if TYPE_CHECKING:
    import torch

    from asynccoll.order.operation import Operation

__all__ = ["UNCOMPARED", "Job", "Program", "Start", "What", "returned"]

#: One native call, given the communicator.
Start = Callable[[Communicator], Completion]
#: Several: each yielded completion is waited for; the last call's is returned.
Program = Callable[[Communicator], Generator[Completion, None, Completion]]
#: What of a call has to be the same on all ranks, besides the native calls that it comes to: shown in errors.
What = str | tuple[Hashable, ...] | None
#: Of a call that other ranks need not make: they go on with other calls meanwhile (``join``).
UNCOMPARED: What = ("goes with any other call",)


def returned(completion: Completion | None) -> Completion:
    """What a backend has returned for a call, which somebody else may have written."""
    if completion is None:
        raise UnsupportedOpError(
            "the backend's communicator has no such call, or returned nothing from it: what it does not have "
            "its capabilities must not name, and a call returns a Completion (Promise, READY) at once"
        )
    return completion


_SETTLED = Promise()
_SETTLED.settle()


class Job:
    """A queued operation: how to start it, and the promise that its ``Operation`` waits on."""

    __slots__ = (
        "called",
        "driven",
        "gate",
        "generator",
        "part",
        "place",
        "program",
        "promise",
        "shares",
        "start",
        "step",
        "stream",
        "ticket",
        "what",
    )

    def __init__(
        self,
        start: Start | None,
        program: Program | None,
        *,
        driven_by: Callable[[], object] | None = None,
        sent: Callable[[], Iterable[Completion]] = tuple,
    ) -> None:
        #: what its first call waits for, and why it is not to be made if that ends with an error
        self.gate: Promise | None = None
        self.place: int = 0  # in the lane's order; a message has none
        self.part: int = 1  # of those at its place
        self.ticket: int = 0  # of its record
        #: its place with other parts of one call, some of which may have been issued
        self.shares: bool = False
        self.what: What = None
        self.called: Spot = NOWHERE
        self.start: Start | None = start
        self.program = program
        #: the input is ready there, whichever thread issues the call
        self.stream: torch.cuda.Stream | None = current()
        #: the waiter drives it, not its completions (``stepping``)
        self.driven: bool = driven_by is not None
        self.promise = Promise() if driven_by is None else Stepping(self, driven_by)
        self.promise.sent = sent
        self.generator: Generator[Completion, None, Completion] | None = None
        self.step: Completion | None = None

    def becomes(self, operation: Operation, spot: Spot, what: What, *, shares: bool) -> None:
        """``operation`` ends with it."""
        self.place, self.part, self.ticket = operation.sequence, operation.part, operation.ticket
        self.called, self.what, self.shares = spot, what, shares

    def abandon(self) -> None:
        """Nobody goes on with it; what it waits for may still write to its memory."""
        if self.step is not None:
            if not self.promise.done():
                self.promise.source = self.promise.source or self.step
            self.step.abandon()

    def let_go(self) -> None:
        """It is over. Its promise, which others may keep, knows the job, and the job all that was sent."""
        self.program = self.generator = None
        self.promise = _SETTLED

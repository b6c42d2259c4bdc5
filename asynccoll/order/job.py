"""What a lane queues: one native call, or a program of several native calls that depend on each other.

Whichever thread runs the steps of a program, they are in the inference mode that was on when it was called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from functools import partial

import torch

from asynccoll.errors import UnsupportedOpError
from asynccoll.host.call_site import NOWHERE, Spot
from asynccoll.order.operation import Operation
from asynccoll.order.stepping import Stepping
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise
from asynccoll.transport.streams import current

#: One native call, given the communicator.
Start = Callable[[Communicator], Completion]
#: Several native calls: each yielded completion is waited for; the completion of the last call is returned.
Program = Callable[[Communicator], Generator[Completion, None, Completion]]
#: What must be the same on all ranks about a call, in addition to its native calls; shown in errors.
What = str | tuple[Hashable, ...] | None
#: The description of a call that other ranks need not make: they make other calls instead (``join``).
UNCOMPARED: What = ("goes with any other call",)


def returned(completion: Completion | None) -> Completion:
    """Check that a backend, perhaps from another package, returned a completion from a call; return it."""
    if completion is None:
        raise UnsupportedOpError(
            "the backend's communicator has no such call, or returned nothing from it: its capabilities must "
            "not list a call that it lacks, and each call must return a Completion (Promise, READY) at once"
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
        #: the comparison that its first call waits for; if this ends with an error, the call is not made
        self.gate: Promise | None = None
        self.place: int = 0  # in the lane's order (``cut``); 0 for a message
        self.part: int = 1  # which part of the call at that place it is
        self.ticket: int = 0  # the number of its entry in the flight recorder
        #: whether it shares its place with other parts of one call, some of which may have been issued
        self.shares: bool = False
        self.what: What = None
        self.called: Spot = NOWHERE
        self.start: Start | None = start
        self.program = program
        #: the stream on which the input is ready, whichever thread issues the call
        self.stream: torch.cuda.Stream | None = current()
        #: whether its waiter drives it rather than its completions (``stepping``)
        self.driven: bool = driven_by is not None
        self.promise = Promise() if driven_by is None else Stepping(self, driven_by)
        self.promise.sent = sent
        self.generator: Generator[Completion, None, Completion] | None = None
        self.step: Completion | None = None

    def becomes(self, operation: Operation, spot: Spot, what: What, *, shares: bool) -> None:
        """Take the place, part and ticket of ``operation``, which ends with this job, and its description."""
        self.place, self.part, self.ticket = operation.sequence, operation.part, operation.ticket
        self.called, self.what, self.shares = spot, what, shares

    def abandon(self) -> None:
        """Give the job up; its promise keeps the step in flight alive, which may still write to memory."""
        if self.step is not None:
            if not self.promise.done():
                self.promise.source = self.promise.source or self.step
            self.step.abandon()

    def fail(self, error: BaseException) -> None:
        """Give the job up, and fail its promise with ``error``."""
        self.abandon()
        self.promise.settle(error)

    def let_go(self) -> None:
        """Drop the job's references: its promise refers to the job, and others may keep the promise."""
        self.program = self.generator = None
        self.promise = _SETTLED


def program_as_called(program: Program) -> Program:
    """Return ``program`` with each of its steps run in the current inference mode."""
    if not torch.is_inference_mode_enabled():
        return program

    def inside(communicator: Communicator) -> Generator[Completion, None, Completion]:
        steps = program(communicator)
        step: Callable[[], Completion] = partial(next, steps)
        while True:
            with torch.inference_mode():
                try:
                    completion = step()
                except StopIteration as stop:
                    last: Completion = stop.value
                    return last
            try:
                yield completion
            except Exception as error:
                step = partial(steps.throw, error)
            else:
                step = partial(next, steps)

    return inside

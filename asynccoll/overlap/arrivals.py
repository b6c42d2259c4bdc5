"""Parameters on their way from the last step of a sharded optimizer, and who has to wait for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.overlap.steps import Steps
from asynccoll.waiting.work import Work

__all__ = ["Arrival", "wait_for"]

#: By the id of a parameter, which its arrival keeps alive.
_arrivals: weakref.WeakValueDictionary[int, Arrival] = host.per_process(weakref.WeakValueDictionary)


class Arrival:
    """The parameters of one bucket on their way from the last step.

    What the hooks of a model hold on to: it outlives the optimizer that sent the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        _arrivals.update((id(x), self) for x in parameters)
        self.work: Work[object] | None = None
        #: indices of the parameters that nobody has waited for since they were sent
        self.stale: set[int] = set()
        self._versions: list[int] = []

    def expect(self, work: Work[object]) -> None:
        """``work`` fills the parameters."""
        work.detach()  # after the last step nobody need wait
        self.work = work
        self.stale = set(range(len(self.parameters)))
        self._versions = [x._version for x in self.parameters]

    def wait(self, indices: Iterable[int]) -> None:
        """Wait without an event loop until they are there; those at ``indices`` may be read now."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        self._may_be_read(self.stale.intersection(indices))

    def steps(self) -> Steps[None]:
        """The same with or without a loop, of all of them."""
        if self.work is not None:
            yield self.work
            self.work = None
        self._may_be_read(set(self.stale))

    def _may_be_read(self, indices: set[int]) -> None:
        self.stale -= indices
        written = [index for index in indices if self.parameters[index]._version != self._versions[index]]
        # The native call wrote past autograd. What has read them before this, in a hook that ran too early,
        # must not be differentiated as if it had read these values: torch refuses it by the version.
        for index in indices:
            torch.autograd.graph.increment_version(self.parameters[index])
        if written:
            shape = list(self.parameters[written[0]].shape)
            raise InvalidArgumentError(
                f"a parameter of shape {shape} was written to before it had come back from the last step, "
                "which may have overwritten that: `await optimizer.gathered()` after the step, then write"
            )


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until those of them are there that a sharded optimizer has sent; blocks, as a forward does."""
    for x in tensors:
        arrival = _arrivals.get(id(x))
        if arrival is not None and arrival.stale:
            arrival.wait(index for index, own in enumerate(arrival.parameters) if own is x)

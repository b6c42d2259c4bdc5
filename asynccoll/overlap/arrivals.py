"""Parameters that the last step of a sharded optimizer has sent, and the waits for them.

An *arrival* stands for the parameters of one bucket from the moment they are sent until everything that reads
them has waited.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from asynccoll import host
from asynccoll.errors import InvalidArgumentError, still_pending
from asynccoll.overlap.steps import Steps
from asynccoll.waiting.work import Work

__all__ = ["Arrival", "wait_for"]

#: The arrival of each parameter, by its id; an arrival keeps its parameters alive, so the ids stay theirs.
_arrivals: weakref.WeakValueDictionary[int, Arrival] = host.per_process(weakref.WeakValueDictionary)


class Arrival:
    """The parameters of one bucket, while they are being sent after a step.

    The model's hooks refer to it, so it may outlive the optimizer that sent the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        _arrivals.update((id(x), self) for x in parameters)
        self.work: Work[object] | None = None
        self.has_failed: bool = False  # whether a wait for ``work`` has raised its error
        #: indices of the parameters for which nothing has waited since they were sent
        self.stale: set[int] = set()
        #: the versions that our own writes have left
        self._versions: list[int] = [x._version for x in parameters]

    def expect(self, work: Work[object]) -> None:
        """Note that ``work`` fills the parameters."""
        work.detach()  # no warning: after the last step nothing has to wait
        self.work, self.has_failed = work, False
        self.stale = set(range(len(self.parameters)))
        self._versions = [x._version for x in self.parameters]

    def wait(self, indices: Iterable[int]) -> None:
        """Wait without an event loop until all have arrived; those at ``indices`` may be read afterwards."""
        if self.work is not None:
            with self._ending():
                self.work.wait()
        self._may_be_read(self.stale.intersection(indices))

    def steps(self) -> Steps[None]:
        """Wait, with or without an event loop, until all have arrived and may be read."""
        if self.work is not None:
            with self._ending():
                yield self.work
        self._may_be_read(set(self.stale))

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Note, after the wait in the block, that the parameters have arrived, or have failed to."""
        try:
            yield
        except Exception as error:
            self.has_failed = not still_pending(error)
            raise
        self.work = None

    @property
    def written(self) -> bool:
        """Whether other code has written to parameters since they were sent last."""
        return any(x._version != ours for x, ours in zip(self.parameters, self._versions, strict=True))

    def forget(self) -> None:
        """Expect nothing more, even if the parameters have failed to arrive."""
        self.work, self.stale = None, set()

    def _may_be_read(self, indices: set[int]) -> None:
        self.stale -= indices
        written = [index for index in indices if self.parameters[index]._version != self._versions[index]]
        # Autograd does not know that the native call wrote to them. A hook that ran too early may have read
        # the old values, and must not be differentiated with the new ones: the version makes torch refuse.
        for index in indices:
            torch.autograd.graph.increment_version(self.parameters[index])
            self._versions[index] += 1
        if written:
            shape = list(self.parameters[written[0]].shape)
            raise InvalidArgumentError(
                f"a parameter of shape {shape} was written to before the last step had gathered it, which "
                "may have overwritten the change: `await optimizer.gathered()` after the step, then write"
            )


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Block, as a forward does, until all ``tensors`` that a sharded optimizer has sent have arrived."""
    for x in tensors:
        arrival = _arrivals.get(id(x))
        if arrival is not None and arrival.stale:
            arrival.wait(index for index, own in enumerate(arrival.parameters) if own is x)

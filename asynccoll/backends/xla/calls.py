"""One rank's side of a collective, and the joint launch of the sides of all ranks in a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from asynccoll.backends.api import Promise, Transfer, mismatch
from asynccoll.backends.xla.collectives import Collective, Matrix
from asynccoll.backends.xla.device import Device
from asynccoll.backends.xla.progress import Progress
from asynccoll.errors import AsyncCollError, CollectiveError, CollectiveMismatchError

#: Puts a result where the caller wants it. Returns what has to be called once the device is done, or None.
Deliver = Callable[[torch.Tensor], Callable[[], object] | None]
#: Makes the input of a collective from what the caller passed.
Shape = Callable[[Any], torch.Tensor]
#: How many rows a rank sends to each rank, and how many it expects from each.
Splits = tuple[Sequence[int], Sequence[int]]


class Replica(Protocol):
    """The replica that makes a call."""

    xla: Device
    progress: Progress


class Call:
    """One rank's side of a collective, from the caller's input to the delivered result.

    It traces only with the lock of its device held, since lanes start calls in any thread.
    """

    __slots__ = (
        "collective",
        "deliver",
        "error",
        "failed_alone",
        "inferring",
        "matrix",
        "promise",
        "replica",
        "result",
        "shape",
        "splits",
        "text",
        "x",
    )

    def __init__(
        self,
        replica: Replica,
        collective: Collective,
        x: Any,
        deliver: Deliver,
        shape: Shape | None,
        splits: Splits | None,
        failed_alone: Callable[[BaseException], object],
    ) -> None:
        """``failed_alone`` is called with a failure after the launch, which the other ranks do not have."""
        self.replica: Replica = replica
        self.collective: Collective = collective
        self.x: torch.Tensor = x
        self.deliver: Deliver = deliver
        self.shape: Shape | None = shape
        self.splits: Splits | None = splits
        self.matrix: Matrix = ()
        self.text: str = collective.text(x) if shape is None else ""  # else set by ``stage``
        self.result: torch.Tensor | None = None
        self.error: BaseException | None = None  # the failure to compute the input
        self.failed_alone: Callable[[BaseException], object] = failed_alone
        self.promise: Promise = Transfer()  # a launch may write even if no thread waits for it
        # The memory for the result was made in the same mode, and can be written to only in it (``modes``).
        self.inferring: bool = torch.is_inference_mode_enabled()

    def stage(self) -> None:
        """Bring the input onto the device, in the shape in which it is sent."""
        device = self.replica.xla
        with device.lock:
            x = self.x if self.shape is None else self.shape(self.x)
            self.x = x.to(device.torch_device)
            device.settle([self.x])
        self.text = self.collective.text(self.x)

    def prepare(self) -> None:
        """Do what is done locally before the launch."""
        device = self.replica.xla
        with device.lock:
            before = self.x
            self.x = self.collective.prepare(before, self.matrix)
            if self.x is not before:
                device.settle([self.x])

    def launch(self) -> None:
        """Launch the collective on this rank's device; all ranks of the group must do so."""
        if self.x.numel():
            device = self.replica.xla
            with device.lock:
                self.result = device.launch(partial(self.collective.trace, self.x))

    def end(self) -> None:
        """Deliver the result and wait for the device. Runs on the replica's progress thread.

        Delivery on the device is a graph built on the result, and is traced while the device is at work.
        """
        device = self.replica.xla
        try:
            if self.result is not None:
                with torch.inference_mode(self.inferring), device.lock:
                    # In inference mode XLA makes no views of tensors that were made outside of it.
                    result = self.result.clone() if self.inferring else self.result
                    rest = self.deliver(self.collective.finish(result, self.matrix))
                device.wait()
                if rest is not None:
                    with torch.inference_mode(self.inferring), device.lock:
                        rest()
        except BaseException as error:
            self.failed_alone(error)
            self.promise.settle(error)
        else:
            self.promise.settle()

    def fail(self, error: BaseException) -> None:
        """End without a launch, with a copy of ``error``, since the calls of several ranks get the same."""
        self.promise.settle(error.copied() if isinstance(error, AsyncCollError) else error)


def launch(calls: Sequence[Call], where: str) -> None:
    """Launch the calls of all ranks of a group; each is then ended by its own replica."""
    try:
        _agree(calls, where)
        for call in calls:
            call.prepare()
        for call in calls:
            call.replica.xla.wait()
        for call in calls:
            call.launch()
    except BaseException as error:
        for call in calls:
            call.fail(error)
        return
    for call in calls:
        call.replica.progress.submit(call.end)


def _agree(calls: Sequence[Call], where: str) -> None:
    """Raise, before anything is launched, if the ranks made different calls or one of them has no input."""
    texts = [call.text for call in calls]
    ranks = calls[0].collective.members.ranks
    for rank, call in zip(ranks, calls, strict=True):
        if call.error is not None:
            raise CollectiveError(
                f"{call.collective.name} on {where}: rank {rank} has no input: {call.error}"
            ) from call.error
    if any(text != texts[0] for text in texts):
        raise mismatch(where, ranks, texts)
    if not calls[0].collective.needs_matrix:
        return
    matrix = agreed([call.splits for call in calls if call.splits is not None], ranks, where)
    for call in calls:
        call.matrix = matrix


def agreed(splits: Sequence[Splits], ranks: Sequence[int], where: str) -> Matrix:
    """Return how many rows each rank sends to each other; raise if one of them expects other numbers."""
    matrix = [sent for sent, _ in splits]
    for index, (_, expected) in enumerate(splits):
        sent = [row[index] for row in matrix]
        if list(expected) != sent:
            raise CollectiveMismatchError(
                f"all_to_all on {where}: rank {ranks[index]} expects {list(expected)} rows from ranks "
                f"{list(ranks)}, which send it {sent} (nothing was sent; the lane is still usable)"
            )
    return matrix

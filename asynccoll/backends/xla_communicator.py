"""One order of collectives between replicas, as the core sees it.

A call goes to the replica's progress thread, which brings its input onto the device and lets it meet
those of the other ranks; whoever comes last launches for all of them (``launch``). Then each progress
thread waits for its own device, puts the result where the caller wants it, and completes the promise.
The caller's thread only hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from asynccoll.backends.base import as_matrix
from asynccoll.backends.xla_collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Matrix,
    Members,
    ReduceScatter,
    Scatter,
)
from asynccoll.backends.xla_device import take_settled
from asynccoll.checks import mismatch
from asynccoll.completion import Completion, Promise
from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError
from asynccoll.modes import uncast
from asynccoll.spec import ReduceOp

if TYPE_CHECKING:
    from asynccoll.backends.xla import XlaBackend
    from asynccoll.backends.xla_meeting import Meeting

__all__ = ["Call", "XlaCommunicator"]

#: Puts a result where the caller wants it; what has to wait for the device is returned, to be called then.
Deliver = Callable[[torch.Tensor], Callable[[], object] | None]
#: Makes the input of a collective of what the caller gave.
Shape = Callable[[Any], torch.Tensor]


class Call:
    """One rank's side of a collective, from the caller's hand to the result.

    What it traces, it traces with the lock of its device held: lanes start calls in any thread.
    """

    __slots__ = (
        "collective",
        "deliver",
        "error",
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
        replica: XlaBackend,
        collective: Collective,
        x: Any,
        deliver: Deliver,
        shape: Shape | None,
        splits: tuple[Sequence[int], Sequence[int]] | None,
    ) -> None:
        self.replica = replica
        self.collective = collective
        self.x = x
        self.deliver = deliver
        self.shape = shape
        self.splits = splits  # (rows to each rank, rows expected from each)
        self.matrix: Matrix = ()
        self.text = collective.text(x) if shape is None else ""  # else once it has it
        self.result: torch.Tensor | None = None
        self.error: BaseException | None = None  # of the computation of its input
        self.promise = Promise()
        # As is the memory that the result is delivered to, which can be written to so alone (``modes``).
        self.inferring = torch.is_inference_mode_enabled()

    def stage(self) -> None:
        """Bring the input onto the device, as it is to travel."""
        device = self.replica.xla
        with device.lock:
            x = self.x if self.shape is None else self.shape(self.x)
            self.x = x.to(device.torch_device)
            device.settle([self.x])
        self.text = self.collective.text(self.x)

    def prepare(self) -> None:
        """What is done locally before the launch."""
        device = self.replica.xla
        with device.lock:
            before, self.x = self.x, self.collective.prepare(self.x, self.matrix)
            if self.x is not before:
                device.settle([self.x])

    def launch(self) -> None:
        """Put the collective on this rank's device; all ranks of the group must follow."""
        if self.x.numel():
            device = self.replica.xla
            with device.lock:
                self.result = device.launch(partial(self.collective.trace, self.x))

    def end(self) -> None:
        """Deliver and wait for the device, in the replica's progress thread.

        What is delivered there is a graph upon the result, which is traced while the device is at work.
        """
        device = self.replica.xla
        try:
            if self.result is not None:
                with torch.inference_mode(self.inferring), device.lock:
                    # XLA makes no views in inference mode of what was made outside of it.
                    result = self.result.clone() if self.inferring else self.result
                    rest = self.deliver(self.collective.finish(result, self.matrix))
                device.wait()
                if rest is not None:
                    with torch.inference_mode(self.inferring), device.lock:
                        rest()
        except BaseException as error:
            self.promise.settle(error)
        else:
            self.promise.settle()

    def fail(self, error: BaseException) -> None:
        self.promise.settle(error)


def launch(calls: Sequence[Call], where: str) -> None:
    """Launch the calls of all ranks that this process has; each is then ended by its own replica."""
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
    """Raise, before anything is launched, if the ranks called different things or one has no input."""
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
    matrix = [call.splits[0] for call in calls if call.splits is not None]
    for index, call in enumerate(calls):
        call.matrix = matrix
        assert call.splits is not None
        sent = [row[index] for row in matrix]
        if list(call.splits[1]) != sent:
            raise CollectiveMismatchError(
                f"all_to_all on {where}: rank {ranks[index]} expects {list(call.splits[1])} rows of the "
                f"ranks {list(ranks)}, which send it {sent} (nothing was sent; the lane is still usable)"
            )


def _bring(call: Call, meet: Callable[[], object]) -> None:
    try:
        call.stage()
    except BaseException as error:
        call.error = error  # the others are told when they come
    meet()


class XlaCommunicator:
    """The calls of one group, lane and epoch."""

    def __init__(self, replica: XlaBackend, members: Members, meeting: Meeting) -> None:
        self._replica = replica
        self._members = members
        self._meeting = meeting

    def _start(
        self,
        collective: Collective,
        x: Any,
        deliver: Deliver,
        shape: Shape | None = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Completion:
        call = Call(self._replica, collective, x, deliver, shape, splits)
        meet = self._meeting.enter(call)
        if shape is None and take_settled(x):
            meet()
        else:
            self._replica.progress.submit(partial(_bring, call, meet))
        return call.promise

    # Arithmetic

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self._start(AllReduce(self._members, "all_reduce", op), x, partial(_put, x))

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        name = f"reduce dst={self._members.ranks[dst]}"
        deliver = partial(_put, x) if self._members.index == dst else _drop
        return self._start(AllReduce(self._members, name, op), x, deliver)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self._start(ReduceScatter(self._members, op), x, partial(_put, out), self._rows)

    # Movement

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        deliver = _drop if self._members.index == src else partial(_put, x)
        return self._start(Broadcast(self._members, src), x, deliver, _flat)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        return self._start(AllGather(self._members, "all_gather"), x, partial(_put, out), _flat)

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        name = f"gather dst={self._members.ranks[dst]}"
        deliver = partial(_put_rows, out) if out is not None else _drop
        return self._start(AllGather(self._members, name), x, deliver, _flat)

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        def rows(parts: Sequence[torch.Tensor] | None) -> torch.Tensor:
            if parts is not None:
                return uncast(torch.stack, [part.view(-1) for part in parts])
            return torch.zeros((self._members.size, out.numel()), dtype=out.dtype, device=out.device)

        return self._start(Scatter(self._members, src), x, partial(_put, out), rows)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        splits = (tuple(in_splits), tuple(out_splits))
        return self._start(AllToAll(self._members), x, partial(_put, out), as_matrix, splits)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        raise AssertionError("XLA has no messages between two ranks: refused before")

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        raise AssertionError("XLA has no messages between two ranks: refused before")

    def refuse(self, role: str, peer: int, tag: int, why: str) -> None:
        """XLA has no messages between two ranks."""

    def barrier(self) -> Completion:
        one = torch.zeros(1, dtype=torch.int32, device="cpu")
        return self._start(Barrier(self._members), one, _drop)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self._members.size, -1)

    # The end

    def retire(self) -> bool:
        self.abort()
        return True

    def inherit(self, previous: XlaCommunicator) -> None:
        """XLA has no messages between two ranks."""

    def close(self) -> None:
        """Nothing is held outside of the meeting."""

    def abort(self) -> None:
        rank = self._members.ranks[self._members.index]
        self._meeting.give_up(PeerLostError(f"replica {rank} has aborted", (rank,)))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def _put(into: torch.Tensor, result: torch.Tensor) -> Callable[[], object] | None:
    if into.device.type == "cpu":
        return lambda: into.copy_(result.cpu().view(into.shape))
    into.copy_(result.view(into.shape))
    return None


def _put_rows(into: Sequence[torch.Tensor], result: torch.Tensor) -> Callable[[], object] | None:
    def put(rows: torch.Tensor) -> None:
        for part, row in zip(into, rows.view(len(into), -1), strict=True):
            part.copy_(row.view(part.shape))

    if into[0].device.type == "cpu":
        return lambda: put(result.cpu())
    put(result)
    return None


def _drop(_: Any) -> None:
    """A result that this rank does not want."""

"""One order of collectives between replicas, as the core sees it.

A call (``calls``) is handed over to the replica's progress thread, which brings its input onto the device and
lets it meet the calls of the other ranks; the last to arrive launches all of them (``launching``). Then each
progress thread waits for its own device, puts the result where the caller wants it, and completes the
promise. The caller's thread only hands the call over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asynccoll.backends.api import Completion, ReduceOp, as_matrix, uncast
from asynccoll.backends.xla.calls import Call, Deliver, Replica, Shape, Splits
from asynccoll.backends.xla.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Members,
    ReduceScatter,
    Scatter,
)
from asynccoll.backends.xla.device import take_settled
from asynccoll.backends.xla.launching import Launcher
from asynccoll.errors import PeerLostError


def _bring(call: Call, arrive: Callable[[], object]) -> None:
    try:
        call.stage()
    except BaseException as error:
        call.error = error  # the other ranks are told when they arrive
    arrive()


class XlaCommunicator:
    """The calls of one group, lane and epoch."""

    def __init__(self, replica: Replica, members: Members, launcher: Launcher) -> None:
        self._replica = replica
        self._members = members
        self._launcher = launcher
        self._failure: BaseException | None = None  # the first failure that the other ranks did not have

    def _start(
        self,
        collective: Collective,
        x: Any,
        deliver: Deliver,
        shape: Shape | None = None,
        splits: Splits | None = None,
    ) -> Completion:
        call = Call(self._replica, collective, x, deliver, shape, splits, self._failed_alone)
        arrive = self._launcher.enter(call)
        if shape is None and take_settled(x):
            arrive()
        else:
            self._replica.progress.submit(partial(_bring, call, arrive))
        return call.promise

    def _failed_alone(self, error: BaseException) -> None:
        self._failure = self._failure or error

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

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Do nothing: XLA has no messages between two ranks."""

    def barrier(self) -> Completion:
        one = torch.zeros(1, dtype=torch.int32, device="cpu")
        return self._start(Barrier(self._members), one, _drop)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self._members.size, -1)

    # The end

    def retire(self) -> bool:
        self.abort()
        self.close()
        return True

    def inherit(self, previous: XlaCommunicator) -> None:
        """Do nothing: XLA has no messages between two ranks."""

    def close(self) -> None:
        self._launcher.leave()

    def abort(self) -> None:
        rank, failure = self._members.ranks[self._members.index], self._failure
        if failure is None:
            # This rank may abort because it has learned that another one is lost; the watchdog says which.
            error = PeerLostError(f"rank {rank} has aborted")
        else:
            why = f"as a call has failed on it alone: {type(failure).__name__}: {failure}"
            error = PeerLostError(f"rank {rank} has given up this lane, {why}", (rank,))
        self._launcher.give_up(error)


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


def _drop(_: object) -> None:
    """Discard a result that this rank does not need."""

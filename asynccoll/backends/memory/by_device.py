"""A lane on two transports: CPU tensors go through shared memory, others through the backend."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from asynccoll.backends.api import Communicator, Completion, ReduceOp, host
from asynccoll.backends.memory.communicator import MemoryCommunicator


class ByDevice:
    """A communicator that uses ``near`` for tensors on the CPU, and ``rest`` for those on a device."""

    parts = None

    def __init__(self, near: MemoryCommunicator, rest: Communicator) -> None:
        self._near = near
        self._rest = rest

    def _for(self, x: torch.Tensor) -> MemoryCommunicator | Communicator:
        return self._near if x.device.type == "cpu" else self._rest

    def announce(self, what: Hashable, spot: object, place: int, part: int, shares: bool) -> None:
        """Say which call the next native calls belong to (see ``Communicator``)."""
        self._near.announce(what, spot, place, part, shares)

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self._for(x).all_reduce(x, op)

    def all_reduce_into(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self._near.all_reduce_into(out, x, op)  # only shared memory supports this

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        return self._for(x).reduce(x, dst, op)

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        return self._for(x).broadcast(x, src)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        return self._for(x).all_gather(out, x)

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        return self._for(x).gather(out, x, dst)

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        return self._for(out).scatter(out, x, src)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        return self._for(x).reduce_scatter(out, x, op)

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Completion:
        return self._for(x).all_to_all(out, x, out_splits, in_splits)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        return self._for(x).send(x, dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        return self._for(x).recv(x, src, tag)

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Do nothing: the receiver's tensor may be on either device, so its transport is unknown."""

    def barrier(self) -> Completion:
        return self._near.barrier()

    def retire(self) -> bool:
        self._near.retire()
        return self._rest.retire()

    def inherit(self, previous: ByDevice) -> None:
        self._near.inherit(previous._near)
        self._rest.inherit(previous._rest)

    def close(self) -> None:
        host.call_each([self._near.close, self._rest.close])  # other ranks wait for both

    def abort(self) -> None:
        host.call_each([self._near.abort, self._rest.abort])

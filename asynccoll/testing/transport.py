"""The backend of simulated ranks: a communicator for each lane, and point-to-point messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asynccoll.backends.api import Backend, Capabilities, Completion, Op, Opening, Promise, ReduceOp, Transfer
from asynccoll.testing.delivery import Delivery
from asynccoll.testing.device import Device
from asynccoll.testing.messages import Letter, Mailbox
from asynccoll.testing.rounds import Call, Wire, fill, spoil
from asynccoll.testing.transports import Over, Transport

__all__ = ["Fabric", "SimulatedBackend"]


class Fabric:
    """The communicators and mailboxes that connect the ranks."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.wires: dict[str, Wire] = {}
        self.mail: dict[tuple[str, int, int, int], Mailbox] = {}

    def kill(self, rank: int) -> None:
        """Close all connections of ``rank``."""
        for wire in list(self.wires.values()):
            if rank in wire.ranks:
                wire.close(wire.ranks.index(rank))
        for (_, src, dst, _), box in list(self.mail.items()):
            if rank in (src, dst):
                box.close(self.delivery)


def _reduced(rows: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce ``rows`` in the order of ranks, by plain torch operations."""
    if op is ReduceOp.AVG:  # a half-precision sum may overflow where its average does not
        wide = torch.promote_types(rows[0].dtype, torch.float64)
        return (torch.stack(list(rows)).to(wide).sum(0) / len(rows)).to(rows[0].dtype)
    total = rows[0].clone()
    for row in rows[1:]:
        total = _COMBINED[op](total, row)
    return total


def _sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x | y if x.dtype is torch.bool else x + y


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x & y if x.dtype is torch.bool else x * y


_COMBINED: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.PRODUCT: _product,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def _whole(size: int) -> float:
    return 1.0


#: The fraction of a rank's bytes that it sends to each of the others, so that it sends in total what it does
#: in the usual algorithms: rings, or a tree (broadcast).
_PARTS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 / size,
    "reduce": lambda size: 1 / size,
    "reduce_scatter": lambda size: 1 / size,
    "scatter": lambda size: 1 / size,
    "all_to_all": lambda size: 1 / size,
    "broadcast": lambda size: math.ceil(math.log2(size)) / max(1, size - 1),
}


class SimulatedBackend(Backend):
    """The backend of one simulated rank."""

    name = "simulated"
    device: torch.device = torch.device("cpu")
    opens_early = True

    def __init__(
        self, fabric: Fabric, transport: Transport, capabilities: Capabilities, device: Device, rank: int
    ) -> None:
        self._fabric = fabric
        self._capabilities = capabilities
        self.ends_alone: bool = transport.ends_alone
        self.orders_lanes: bool = transport.orders_lanes
        self._over = transport.over(device, partial(fabric.delivery.within, rank))

    def capabilities(self, device: str) -> Capabilities:
        return self._capabilities

    def open(self, opening: Opening) -> _Communicator:
        assert opening.clients is not None
        index, size = opening.rank, opening.size
        opening.clients.meet(opening.name, index, size, opening.meeting, opening.given_up)
        keeps = Op.REDUCE in self._capabilities.keeps_input
        return _Communicator(self._fabric, opening, self._over, keeps_input=keeps, ends_alone=self.ends_alone)

    def close(self, *, abort: bool) -> None:
        """Do nothing: the lanes are closed already."""


class _Communicator:
    """One member's end of a wire, and of its mailboxes."""

    parts = None

    def __init__(
        self, fabric: Fabric, opening: Opening, over: Over, *, keeps_input: bool, ends_alone: bool
    ) -> None:
        self._ends_alone = ends_alone
        self._keeps_input = keeps_input
        self._over = over
        self._fabric = fabric
        self._delivery = fabric.delivery
        self._name = opening.lasting  # messages outlive an epoch
        self._wire = fabric.wires.setdefault(opening.name, Wire(fabric.delivery, opening.name, opening.ranks))
        self._index = opening.rank
        self._rank = opening.ranks[opening.rank]
        self._all = frozenset(range(opening.size))

    def _post(
        self,
        signature: tuple[Any, ...],
        sent: Sequence[torch.Tensor],
        filled: Sequence[torch.Tensor],
        needs: frozenset[int],
        finish: Callable[[list[list[torch.Tensor]]], object],
    ) -> Completion:
        needs = needs if self._ends_alone else self._all
        size_bytes = sum(x.nbytes for x in sent) * _PARTS.get(signature[0], _whole)(len(self._all))
        call = Call(self._index, signature, list(sent), list(filled), needs, size_bytes, finish)
        return self._over(self._wire.post(call), self._name)

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        def finish(rows: list[list[torch.Tensor]]) -> None:
            fill(x, _reduced([row[0] for row in rows], op))

        return self._post(("all_reduce", x.numel(), x.dtype, op.value), [x], [x], self._all, finish)

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        here = self._index == dst

        def finish(rows: list[list[torch.Tensor]]) -> None:
            if here:
                fill(x, _reduced([row[0] for row in rows], op))

        needs = self._all if here else frozenset({self._index})
        filled = [x] if here or not self._keeps_input else []
        return self._post(("reduce", x.numel(), x.dtype, op.value, dst), [x], filled, needs, finish)

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        here = self._index == src

        def finish(rows: list[list[torch.Tensor]]) -> None:
            if not here:
                fill(x, rows[src][0])

        sent, filled = ([x], []) if here else ([], [x])
        return self._post(("broadcast", x.numel(), x.dtype, src), sent, filled, frozenset({src}), finish)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        def finish(rows: list[list[torch.Tensor]]) -> None:
            fill(out, torch.cat([row[0].view(-1) for row in rows]))

        return self._post(("all_gather", x.numel(), x.dtype), [x], [out], self._all, finish)

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        def finish(rows: list[list[torch.Tensor]]) -> None:
            for place, row in zip(out or (), rows, strict=False):
                fill(place, row[0])

        needs = self._all if self._index == dst else frozenset({self._index})
        return self._post(("gather", x.numel(), x.dtype, dst), [x], out or [], needs, finish)

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        def finish(rows: list[list[torch.Tensor]]) -> None:
            fill(out, rows[src][self._index])

        return self._post(("scatter", out.numel(), out.dtype, src), x or [], [out], frozenset({src}), finish)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        def finish(rows: list[list[torch.Tensor]]) -> None:
            total = _reduced([row[0].view(-1) for row in rows], op)
            fill(out, total.chunk(len(rows))[self._index])

        return self._post(("reduce_scatter", x.numel(), x.dtype, op.value), [x], [out], self._all, finish)

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Completion:
        def finish(rows: list[list[torch.Tensor]]) -> None:
            parts = [row[self._index] for row in rows]
            for place, part in zip(torch.split(out.data, list(out_splits)), parts, strict=True):
                if place.numel() != part.numel():  # copy_ would broadcast a single element
                    raise RuntimeError(f"{part.numel()} elements came where {place.numel()} were expected")
                place.copy_(part)

        parts = list(torch.split(x, list(in_splits)))
        return self._post(("all_to_all", x.dtype), parts, [out], self._all, finish)

    def barrier(self) -> Completion:
        return self._post(("barrier",), [], [], self._all, lambda rows: None)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        to = self._wire.ranks[dst]
        self._delivery.called(self._rank, f"send to {to} on {self._name}")
        box, promise = self._box(self._rank, to, tag), Promise()
        at = self._delivery.arrival(x.nbytes, self._rank, to)
        box.letters.append(Letter(at, x.detach().clone(), promise, self._rank))
        box.match(self._delivery)
        return self._over(promise, f"{self._name} to {dst} {tag}")

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        of = self._wire.ranks[src]
        self._delivery.called(self._rank, f"recv from {of} on {self._name}")
        box, promise = self._box(of, self._rank, tag), Transfer()
        spoil(x)
        box.readers.append((x, promise, self._rank))
        box.match(self._delivery)
        return self._over(promise, f"{self._name} from {src} {tag}")

    def refuse(self, dst: int, tag: int, why: str) -> None:
        to = self._wire.ranks[dst]
        box = self._box(self._rank, to, tag)
        at = self._delivery.arrival(len(why), self._rank, to)
        box.letters.append(Letter(at, why, Promise(), self._rank))
        box.match(self._delivery)

    def _box(self, src: int, dst: int, tag: int) -> Mailbox:
        box = self._fabric.mail.setdefault((self._name, src, dst, tag), Mailbox())
        box.closed = box.closed or not self._delivery.network.dead.isdisjoint((src, dst))
        return box

    def retire(self) -> bool:
        self._wire.close(self._index)
        return True

    def inherit(self, previous: _Communicator) -> None:
        """Do nothing: mailboxes go by a name that the lane keeps in every epoch."""

    def close(self) -> None:
        """Do nothing: nothing is in flight."""

    def abort(self) -> None:
        self._wire.close(self._index)
        for (name, src, dst, _), box in list(self._fabric.mail.items()):
            if name == self._name and self._rank in (src, dst):
                box.close(self._delivery)

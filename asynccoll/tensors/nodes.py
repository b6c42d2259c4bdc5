"""Collectives that go node by node, as programs of the lane: within each node, and between nodes.

An all_reduce is reduced within each node, then between nodes, and then shared within the node. If the ranks
of a node share memory, broadcast, all_gather and reduce_scatter go this way, too. Only ranks with the same
place in their nodes communicate across the network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from asynccoll.errors import collective_error
from asynccoll.memory.arithmetic import reduce_chunks
from asynccoll.order.job import Program
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import ReduceOp
from asynccoll.tensors.common import OFFLOAD_BYTES, in_thread
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import READY, Completion

_Steps = Generator[Completion, None, Completion]

#: Up to this size one rank reduces for its whole node: a part for each rank means more steps between nodes.
_BY_ONE_BYTES = 64 << 10
#: Up to this many bytes per other node, nodes exchange their data, and each reduces it itself.
_EXCHANGE_BYTES = 128 << 10


def nodes_first(lane: Lane, x: torch.Tensor, op: ReduceOp, *, near: bool) -> Program:
    """Return the program that reduces the contiguous ``x`` in place, with the same bits on every rank.

    Every element is reduced by one rank of the node, in rank order, and then across nodes: in node order if
    the data is small, else by the backend. ``near``: the ranks of a node share memory.
    """
    group = lane.group
    each = group.size // group.nodes
    flat = x.view(-1)
    average = op is ReduceOp.AVG
    on_wire = ReduceOp.SUM if average else op

    def divided(part: torch.Tensor) -> None:
        if average:
            part.div_(group.size)

    def by_one(communicator: Communicator) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        yield within.reduce(flat, 0, on_wire)
        if group.place[1] == 0:
            yield from _reduced_across(across, flat, on_wire, group.nodes)
            divided(flat)
        return within.broadcast(flat, 0)

    def by_parts_in_memory(communicator: Communicator) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        part = flat.new_empty(flat.numel() // each)
        yield within.reduce_scatter(part, flat, on_wire)
        yield from _reduced_across(across, part, on_wire, group.nodes)
        divided(part)
        return within.all_gather(flat, part)

    def by_parts(communicator: Communicator) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        parts = _split(flat.numel(), each)
        own = parts[group.place[1]]
        rows = flat.new_empty((each, own))
        part, received, evenly = rows[0], rows.view(-1), [own] * each

        def share() -> None:
            divided(part)
            rows[1:].copy_(part)

        yield within.all_to_all(received, flat, evenly, parts)
        yield from _locally(rows, lambda: reduce_chunks(rows.unbind(0), on_wire, part))
        yield across.all_reduce(part, on_wire)
        yield from _locally(rows, share)
        return within.all_to_all(flat, received, parts, evenly)

    if near and (flat.nbytes <= _BY_ONE_BYTES or flat.numel() < each):
        return by_one
    return by_parts_in_memory if near and flat.numel() % each == 0 else by_parts


def broadcast_by_node(lane: Lane, x: torch.Tensor, src: int) -> Program:
    """Return the program that overwrites the contiguous ``x`` with that of the member with index ``src``."""
    group = lane.group
    node, index = group.place_of(src)
    flat = x.view(-1)

    def program(communicator: Communicator) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        here, place = group.place
        if here != node and place == index:
            yield across.broadcast(flat, node)
        inside: Completion = within.broadcast(flat, index)
        if here == node and place == index:
            yield inside
            return across.broadcast(flat, node)
        return inside

    return program


def gathered_by_node(lane: Lane, out: torch.Tensor, x: torch.Tensor) -> Program:
    """Return the program that fills the flat ``out`` with every rank's flat ``x``, in rank order.

    Each rank gathers from the ranks in the same place of the other nodes; then the ranks of a node share what
    they have.
    """
    group = lane.group
    each = group.size // group.nodes
    order = _by_place(lane)

    def program(communicator: Communicator) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        column = x.new_empty(group.nodes * x.numel())
        columns = x.new_empty(each * column.numel())
        yield across.all_gather(column, x)
        yield within.all_gather(columns, column)
        rows, target = columns.view(group.size, -1), out.view(group.size, -1)

        def arrange() -> None:
            for source, row in enumerate(order):
                target[row].copy_(rows[source])

        yield from _locally(out, arrange)
        return READY

    return program


def scattered_by_node(lane: Lane, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Program:
    """Return the program that fills the flat ``out`` with this rank's part of the reduction of flat ``x``.

    Every element is reduced within each node in rank order, and then across nodes in node order.
    """
    group = lane.group
    order = _by_place(lane)
    average = op is ReduceOp.AVG
    on_wire = ReduceOp.SUM if average else op

    def program(communicator: Communicator) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        rows = x.view(group.size, -1)
        sent = rows
        if order != list(range(group.size)):
            sent = torch.empty_like(rows)

            def arrange() -> None:
                for place, row in enumerate(order):
                    sent[place].copy_(rows[row])

            yield from _locally(sent, arrange)
        column = out.new_empty((group.nodes, out.numel()))
        yield within.reduce_scatter(column.view(-1), sent.view(-1), on_wire)
        received = torch.empty_like(column)
        evenly = [out.numel()] * group.nodes
        yield across.all_to_all(received.view(-1), column.view(-1), evenly, evenly)

        def total() -> None:
            reduce_chunks(received.unbind(0), on_wire, out)
            if average:
                out.div_(group.size)

        yield from _locally(received, total)
        return READY

    return program


def _by_place(lane: Lane) -> list[int]:
    """Return the members of the group, ordered by their place within nodes, and then by node."""
    group = lane.group
    return sorted(range(group.size), key=lambda index: group.place_of(index)[::-1])


def _reduced_across(
    across: Any, part: torch.Tensor, op: ReduceOp, nodes: int
) -> Generator[Completion, None, None]:
    """Reduce ``part`` in place across nodes."""
    if part.nbytes * (nodes - 1) > _EXCHANGE_BYTES:
        yield across.all_reduce(part, op)
        return
    rows = part.new_empty((nodes, part.numel()))
    yield across.all_gather(rows.view(-1), part)
    reduce_chunks(rows.unbind(0), op, part)


def _split(numel: int, parts: int) -> list[int]:
    """Return how many elements each part has: as equal as possible."""
    least, more = divmod(numel, parts)
    return [least + (part < more) for part in range(parts)]


def _locally(rows: torch.Tensor, job: Callable[[], object]) -> Generator[Completion, None, None]:
    """Run ``job``, which uses ``rows``: on this thread, which handles completions, unless it takes long."""
    if rows.nbytes <= OFFLOAD_BYTES:
        job()
    else:
        yield in_thread(job)


def _opened(lane: Lane, communicator: Any) -> Generator[Completion, None, tuple[Communicator, Communicator]]:
    """Return the communicators within the node and across nodes, which the lane's first such program opens.

    If that fails, the lane is given up: a rank that opens them late would find that the others have moved on.
    """
    if communicator.parts is None:
        try:
            yield in_thread(communicator.open_parts)
        except Exception as error:
            lane.break_off(collective_error(error, f"opening {lane} by node"))
            raise
    within, across = communicator.parts
    return within, across

"""An all_reduce that sums up each node first, as a program of the lane: four steps instead of a ring of all.

A rank's part is reduced within its node, then with the same part of the other nodes, and then shared
within the node. All that crosses the network is one ring of nodes for each part.
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
from asynccoll.transport.completion import Completion

__all__ = ["nodes_first"]

_Steps = Generator[Completion, None, Completion]


def nodes_first(lane: Lane, x: torch.Tensor, op: ReduceOp) -> Program:
    """The program that reduces the contiguous ``x`` in place, the same bits on every rank.

    Every element is reduced by one rank of the node, in rank order, and by one ring across the nodes.
    """
    group = lane.group
    each = group.size // group.nodes
    flat = x.view(-1)
    parts = _split(flat.numel(), each)
    own = parts[group.place[1]]
    average = op is ReduceOp.AVG
    on_wire = ReduceOp.SUM if average else op

    def program(communicator: Any) -> _Steps:
        within, across = yield from _opened(lane, communicator)
        rows = flat.new_empty((each, own))
        part, received, evenly = rows[0], rows.view(-1), [own] * each

        def share() -> None:
            if average:
                part.div_(group.size)
            rows[1:].copy_(part)

        yield within.all_to_all(received, flat, evenly, parts)
        yield from _locally(rows, lambda: reduce_chunks(rows.unbind(0), on_wire, part))
        yield across.all_reduce(part, on_wire)
        yield from _locally(rows, share)
        last: Completion = within.all_to_all(flat, received, parts, evenly)
        return last

    return program


def _split(numel: int, parts: int) -> list[int]:
    """How many elements each part has: as equal as can be."""
    least, more = divmod(numel, parts)
    return [least + (part < more) for part in range(parts)]


def _locally(rows: torch.Tensor, job: Callable[[], object]) -> Generator[Completion, None, None]:
    """Run ``job``, which reads or writes ``rows``: here, where completions arrive, unless it takes long."""
    if rows.nbytes <= OFFLOAD_BYTES:
        job()
    else:
        yield in_thread(job)


def _opened(lane: Lane, communicator: Any) -> Generator[Completion, None, tuple[Any, Any]]:
    """The communicators within the node and across nodes, which the lane's first such program opens.

    Without them the lane is given up: a rank that comes late would find the others gone on.
    """
    if communicator.parts is None:
        try:
            yield in_thread(communicator.open_parts)
        except Exception as error:
            lane.break_off(collective_error(error, f"opening {lane} by node"))
            raise
    within, across = communicator.parts
    return within, across

"""Collectives of all kinds in flight, with their expected results, for tests of many of them."""

from __future__ import annotations

from typing import Any

import torch

import asynccoll as ac
import oracle
from ranks import Rank

__all__ = ["KINDS", "begin", "check"]

KINDS = (
    "all_reduce",
    "avg",
    "all_gather",
    "broadcast",
    "all_to_all",
    "permute",
    "reduce_scatter",
    "scatter",
    "number",
    "object",
)


def begin(me: Rank, kind: str, base: torch.Tensor, root: int, lane: str, place: Any) -> tuple[Any, Any]:
    """Start a collective. Returns its work, and the expected result."""
    every = [base + rank for rank in range(me.size)]
    x = every[me.rank].to(place)
    match kind:
        case "all_reduce":
            return ac.all_reduce(x, lane=lane), sum(every)
        case "avg":
            return ac.all_reduce(x, op="avg", lane=lane), sum(every) / me.size
        case "all_gather":
            return ac.all_gather(x, lane=lane), torch.cat(every)
        case "broadcast":
            return ac.broadcast(x, src=root, lane=lane), every[root]
        case "all_to_all":
            return ac.all_to_all(x, lane=lane), oracle.all_to_all(every)[me.rank]
        case "permute":
            ring = [(rank, (rank + 1) % me.size) for rank in range(me.size)]
            return ac.permute(x, ring, lane=lane), every[me.rank - 1]
        case "reduce_scatter":
            return ac.reduce_scatter(x, lane=lane), oracle.reduce_scatter(every, "sum")[me.rank]
        case "scatter":
            given = x if me.rank == root else None
            return ac.scatter(given, src=root, lane=lane), every[root].chunk(me.size)[me.rank]
        case "number":
            return ac.all_reduce(me.rank, lane=lane), sum(range(me.size))
    return ac.all_gather_object({"rank": me.rank}, lane=lane), [{"rank": rank} for rank in range(me.size)]


def check(me: Rank, flying: list[tuple[str, Any, Any]]) -> None:
    """Check that everything in flight gives its expected result."""
    for what, work, want in flying:
        with me.case(what):
            got = work.wait()
            if isinstance(got, torch.Tensor):
                assert torch.equal(got.cpu(), want)
            else:
                assert got == want
    flying.clear()

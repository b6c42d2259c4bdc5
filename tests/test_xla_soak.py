"""Many collectives of all kinds on XLA's replicas: right values, and the process goes on."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import asynccoll as ac
import needs
import oracle
import worlds
from ranks import Rank

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)

#: Collectives, and which ones; `make soak` has more patience.
TURNS = int(os.environ.get("ASYNCCOLL_TEST_SOAK", "300"))
SEED = int(os.environ.get("ASYNCCOLL_TEST_SEED", "1"))
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
    """A collective on its way, and what it must give."""
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
    """Everything on its way gives what it must."""
    for what, work, want in flying:
        with me.case(what):
            got = work.wait()
            if isinstance(got, torch.Tensor):
                assert torch.equal(got.cpu(), want)
            else:
                assert got == want
    flying.clear()


def mixed(me: Rank, turns: int, seed: int) -> int:
    """Of any kind, size and place, on two lanes; one after the other, or several in flight."""
    import torch_xla

    order = random.Random(seed)
    flying: list[tuple[str, Any, Any]] = []
    for turn in range(turns):
        kind, lane = order.choice(KINDS), order.choice(["default", "other"])
        size, root = order.choice([1, 7, 64, 1000]) * me.size, order.randrange(me.size)
        place = ac.device() if order.random() < 0.7 else "cpu"
        base = torch.arange(size, dtype=torch.float32)
        flying.append((f"{turn}: {kind} of {size}", *begin(me, kind, base, root, lane, place)))
        if order.random() < 0.1:
            torch_xla.sync()
        if len(flying) == 8 or order.random() < 0.4:
            check(me, flying)
    check(me, flying)
    return turns


@pytest.mark.parametrize("size", [4, 8])
def test_soak(size: int) -> None:
    """Up to eight in flight."""
    assert worlds.world("xla-tpu", size).run(mixed, TURNS, SEED, timeout=140) == [TURNS] * size

"""Many calls of all kinds through memory: right values, whatever size, dtype and number in flight."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import asynccoll as ac
import worlds
from ranks import Rank
from soaking import KINDS, begin, check

#: Collectives of each world, and which ones; `make nightly` has more patience.
TURNS = int(os.environ.get("ASYNCCOLL_TEST_MEMORY_SOAK", "300"))
SEED = int(os.environ.get("ASYNCCOLL_TEST_SEED", "1"))
#: Elements for each rank: one or none, odd, below and beyond a slot, and in many steps.
SIZES = (0, 1, 3, 64, 1001, 20_011)
LARGE = (70_001, 400_003)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int16, torch.bfloat16)


def mixed(me: Rank, turns: int, seed: int) -> int:
    """Of any kind, size and dtype, on three lanes; one after the other, or up to 24 in flight."""
    order = random.Random(seed)
    flying: list[tuple[str, Any, Any]] = []
    most = 1
    for turn in range(turns):
        kind, lane = order.choice((*KINDS, "message")), order.choice(["default", "other", "third"])
        size, root = (
            order.choice(SIZES if order.random() < 0.97 else LARGE) * me.size,
            order.randrange(me.size),
        )
        dtype = order.choice(DTYPES)
        if kind == "avg" and not dtype.is_floating_point:
            dtype = torch.float32
        base = torch.arange(size).remainder(5).to(dtype)  # exact in each of them
        what = f"{turn}: {kind} of {size} {dtype}"
        if kind == "message":
            flying += around(me, what, base, lane, order.randrange(3))
        else:
            flying.append((what, *begin(me, kind, base, root, lane, "cpu")))
        if len(flying) >= most:
            check(me, flying)
            most = order.choice([1, 1, 2, 8, 24])
    check(me, flying)
    return turns


def around(me: Rank, what: str, base: torch.Tensor, lane: str, tag: int) -> list[tuple[str, Any, Any]]:
    """A message to the next rank, and one from the rank before."""
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    return [
        (what, ac.recv(torch.empty_like(base), src=before, tag=tag, lane=lane), base + before),
        (what, ac.send(base + me.rank, dst=after, tag=tag, lane=lane), None),
    ]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_soak(size: int) -> None:
    assert worlds.world("memory", size).run(mixed, TURNS, SEED, timeout=max(60, TURNS / 50)) == [TURNS] * size

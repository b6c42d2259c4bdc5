"""Many collectives of all kinds on XLA's replicas: values are right, and the process survives."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import asynccoll as ac
import needs
import worlds
from ranks import Rank
from soaking import KINDS, begin, check

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)

#: How many collectives, and the seed that draws them; `make soak` runs more.
TURNS = int(os.environ.get("ASYNCCOLL_TEST_SOAK", "300"))
SEED = int(os.environ.get("ASYNCCOLL_TEST_SEED", "1"))


def mixed(me: Rank, turns: int, seed: int) -> int:
    """Collectives of any kind, size and device, on two lanes, one after the other or several in flight."""
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
    """Up to eight collectives are in flight."""
    assert worlds.world("xla-tpu", size).run(mixed, TURNS, SEED, timeout=140) == [TURNS] * size

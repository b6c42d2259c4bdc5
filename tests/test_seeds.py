"""``manual_seed``: the same numbers on all ranks, or different numbers on each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import asynccoll as ac
from ranks import Rank
from worlds import World

Drawn = tuple[int, float, float, float]


def drawn(seed: int, by_rank: bool) -> Drawn:
    used = ac.manual_seed(seed, by_rank=by_rank)
    return used, random.random(), float(np.random.rand()), torch.rand(()).item()


def on_a_rank(me: Rank, by_rank: bool) -> Drawn:
    return drawn(7, by_rank)


@pytest.mark.parametrize("by_rank", [False, True])
def test_the_seed_is_the_ranks_or_everybodys(pair: World, by_rank: bool) -> None:
    for rank, (used, *numbers) in enumerate(pair.run(on_a_rank, by_rank, runner="blocking")):
        assert used == 7 + rank * by_rank
        assert (used, *numbers) == drawn(used, False)


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_what_numpy_would_not_take_is_refused(seed: int) -> None:
    with pytest.raises(ac.InvalidArgumentError, match="a seed must be from 0 to 4294967295"):
        ac.manual_seed(seed)

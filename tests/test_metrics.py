"""``gather_for_metrics``: what one process would have of the whole dataset, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import asynccoll as ac
from ranks import Rank
from worlds import World


def of_a_dataset(me: Rank, length: int, shuffle: bool, drop_last: bool) -> tuple[Any, Any, list[Any]]:
    """Labels and scores as gathered, and the samples that each rank drew."""
    sampler = DistributedSampler(
        range(length), me.size, me.rank, shuffle=shuffle, seed=3, drop_last=drop_last
    )
    mine = list(sampler)
    labels = torch.tensor(mine, dtype=torch.int64)
    given = {"label": labels, "score": torch.stack([labels, -labels], dim=1)}
    found = ac.gather_for_metrics(given, samples=length).wait()
    drawn = [
        list(DistributedSampler(range(length), me.size, rank, shuffle=shuffle, seed=3, drop_last=drop_last))
        for rank in range(me.size)
    ]
    return found["label"].tolist(), found["score"].tolist(), drawn


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [1, 5, 6, 7])
def test_each_sample_once_in_the_order_of_the_sampler(
    world: World, runner: str, length: int, shuffle: bool, drop_last: bool
) -> None:
    for labels, scores, drawn in world.run(of_a_dataset, length, shuffle, drop_last, runner=runner):
        expected = [one for turn in zip(*drawn, strict=True) for one in turn][:length]
        assert labels == expected
        assert scores == [[i, -i] for i in expected]
        if not drop_last:
            assert sorted(labels) == list(range(length))


def test_what_has_no_rows_is_refused() -> None:
    for given, said in [(1.5, "a float"), (torch.tensor(1.0), "a 0-d tensor"), ({"x": "s"}, "a str")]:
        with pytest.raises(ac.PayloadTypeError, match=f"gather_for_metrics got {said}"):
            ac.gather_for_metrics(given, samples=3)
    with pytest.raises(ac.InvalidArgumentError, match="samples=0"):
        ac.gather_for_metrics(torch.ones(3), samples=0)

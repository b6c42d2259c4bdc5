"""``gather_for_metrics`` returns what one process would have of the dataset, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import asynccoll as ac
from ranks import Rank
from worlds import World


def of_a_dataset(me: Rank, length: int, shuffle: bool, drop_last: bool) -> tuple[Any, Any, list[Any]]:
    """Return labels and scores as gathered, and the samples that each rank drew."""
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


def of_what_is_left(me: Rank, length: int, taken: int) -> tuple[list[int], list[int], list[int]]:
    """Return the samples gathered before a state was saved and after it was loaded, and this rank's own."""
    first = ac.auto_dataloader(range(length), batch_size=me.size, shuffle=True)
    first.sampler.set_epoch(2)
    batches = iter(first)
    before = [next(batches) for _ in range(taken)]
    state = first.sampler.state_dict()
    again = ac.auto_dataloader(range(length), batch_size=me.size, shuffle=True)
    again.sampler.load_state_dict(state)
    again.sampler.set_epoch(2)
    after = list(again)
    whole = ac.gather_for_metrics(torch.cat(before), samples=state["seen"]).wait()
    left = ac.gather_for_metrics(torch.cat(after), samples=state["length"] - state["seen"]).wait()
    return whole.tolist(), left.tolist(), torch.cat(before + after).tolist()


@pytest.mark.parametrize(("length", "taken"), [(7, 1), (10, 2), (11, 1), (13, 2)])
def test_of_a_resumed_epoch_each_sample_once(world: World, length: int, taken: int) -> None:
    """The samples before and after make up the dataset, even if the number of ranks does not divide it."""
    for whole, left, mine in world.run(of_what_is_left, length, taken):
        assert sorted(whole + left) == list(range(length))
        assert set(mine) <= set(range(length))


def with_one_refused(me: Rank, rows: int, samples: int, keys: list[Any]) -> str:
    given: Any = {key: torch.arange(rows if me.rank else 2) for key in (keys if me.rank else ["a"])}
    try:
        ac.gather_for_metrics(given, samples=samples if me.rank else 4).wait()
    except ac.AsyncCollError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("rows", "samples", "keys", "said"),
    [
        (4, 4, ["a"], "InvalidArgumentError: gather_for_metrics got 4 rows, but a rank's share"),
        (2, 0, ["a"], "InvalidArgumentError: gather_for_metrics: samples=0"),
        (2, 4, [frozenset("a"), frozenset("b")], "PayloadTypeError: a dict has a frozenset among its keys"),
    ],
)
def test_what_is_not_a_share_of_the_dataset_is_refused(
    pair: World, rows: int, samples: int, keys: list[Any], said: str
) -> None:
    """If each rank gave all samples, the result would have some twice; the other ranks learn of a refusal."""
    there, here = pair.run(with_one_refused, rows, samples, keys)
    assert here.startswith(said)
    assert there.startswith("PeerRefusedError")
    assert said in there


def test_what_has_no_rows_is_refused() -> None:
    for given, said in [(1.5, "a float"), (torch.tensor(1.0), "a 0-d tensor"), ({"x": "s"}, "a str")]:
        with pytest.raises(ac.PayloadTypeError, match=f"gather_for_metrics got {said}"):
            ac.gather_for_metrics(given, samples=3)
    with pytest.raises(ac.InvalidArgumentError, match="samples=0"):
        ac.gather_for_metrics(torch.ones(3), samples=0)

"""NumPy's integers, e.g. of ``np.arange``, are taken wherever an integer is; bools and tensors are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import asynccoll as ac
import oracle
from asynccoll.environment.nodes import Nodes
from asynccoll.host.misfits import integer
from ranks import Rank
from worlds import World


@pytest.mark.parametrize("number", [5, np.int64(5), np.uint8(5), np.int32(5)])
def test_integers(number: Any) -> None:
    assert integer(number) == 5
    assert type(integer(number)) is int


@pytest.mark.parametrize(
    "other", [True, np.True_, 5.0, np.float32(5), "5", None, torch.tensor(5), np.array([5])]
)
def test_what_is_not_taken_for_an_integer(other: Any) -> None:
    assert integer(other) is None


async def as_arguments(me: Rank) -> None:
    first, second = np.arange(2)
    x = oracle.counting(me.rank, (2, 2), torch.float32)
    theirs = [oracle.counting(rank, (2, 2), torch.float32) for rank in range(2)]
    peer = np.int32(1 - me.rank)
    await me.check("root", ac.broadcast, x, src=second, expect=theirs[1])
    await me.check("object root", ac.broadcast_object, me.rank, src=second, expect=1)
    await me.check("dim", ac.all_gather, x, dim=second, expect=torch.cat(theirs, 1))
    await me.check("group", ac.all_reduce, x, group=np.arange(2), expect=theirs[0] + theirs[1])
    await me.check("index in a group", ac.broadcast, x, group_src=first, group=[0, 1], expect=theirs[0])
    rows = torch.cat([theirs[0][me.rank :][:1], theirs[1][me.rank :][:1]])
    await me.check("splits", ac.all_to_all, x, input_split_sizes=np.ones(2, dtype=np.int64), expect=rows)
    await me.check("pairs", ac.permute, x, [(first, second), (second, first)], expect=theirs[int(peer)])
    work = ac.send(x, dst=peer, tag=np.int16(3))
    await me.check("tag", ac.recv, x, src=peer, tag=3, expect=theirs[int(peer)])
    await me.get(work)
    mine, _ = ac.new_subgroups(np.int64(2))
    assert mine.ranks == (0, 1)


def test_as_arguments_of_collectives(pair: World, runner: str) -> None:
    pair.run(as_arguments, runner=runner)


def test_as_the_number_of_ranks_and_as_a_seed() -> None:
    nodes = Nodes(np.int64(2), nnodes=np.int64(3), node_rank=np.int64(1), master_addr="a", master_port=1)  # type: ignore[arg-type]  # NumPy's
    assert (nodes.world_size, nodes.first, nodes.node_rank) == (6, 2, 1)
    assert ac.manual_seed(np.uint8(7)) == 7  # type: ignore[arg-type]  # NumPy's

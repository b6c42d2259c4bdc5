"""torch's own collectives next to ours in shared memory: they go through gloo, in an order of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import asynccoll as ac
import oracle
import worlds
from ranks import Rank
from worlds import World


@pytest.fixture(scope="module")
def world() -> World:
    return worlds.world("memory", 3)


async def crossed(me: Rank) -> None:
    """Ranks start our calls and torch's in opposite order, with many in flight."""
    for turn in range(20):
        ours, raw = torch.full((5000,), float(turn + me.rank)), torch.full((5000,), float(2 * turn + me.rank))
        expected = [torch.full((5000,), 3.0 * base + 3.0) for base in (turn, 2 * turn)]
        if me.rank % 2:
            work = ac.all_reduce(ours)
            handle = dist.all_reduce(raw, async_op=True)
        else:
            handle = dist.all_reduce(raw, async_op=True)
            work = ac.all_reduce(ours)
        assert handle is not None
        oracle.same(await me.get(work), expected[0])
        handle.wait()
        oracle.same(raw, expected[1])


def test_raw_collectives_have_an_order_of_their_own(world: World) -> None:
    world.run(crossed)


async def functionally(me: Rank) -> None:
    group = ac.new_group(range(me.size)).process_group()
    x = torch.arange(1000.0) + me.rank
    total = 3 * torch.arange(1000.0) + 3
    theirs = functional.all_reduce(x, "sum", group)
    work = ac.all_reduce(x)
    oracle.same(await me.get(work), total)
    oracle.same(functional.wait_tensor(theirs), total)


def test_functional_collectives(world: World) -> None:
    world.run(functionally)


async def rounded(me: Rank) -> tuple[bytes, bool]:
    """bfloat16 is summed in rank order, in float32, and rounded once."""
    rows = [
        torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(3)
    ]
    got = await me.get(ac.all_reduce(rows[me.rank]))
    once = ((rows[0].float() + rows[1].float()) + rows[2].float()).bfloat16()
    return oracle.to_bytes(got).tobytes(), torch.equal(got, once)


def test_the_bits_of_half_precision(world: World) -> None:
    results = world.run(rounded)
    assert all(alike for _, alike in results)
    assert len({bits for bits, _ in results}) == 1

"""What simulated worlds have found, each kept as it was found: in the order, and with the fault."""

from __future__ import annotations

import pytest
import torch

import asynccoll as ac
from asynccoll.testing import PCT, Stop, explore, simulate
from compositions import from_json
from simulated import complaints


def test_one_call_of_two_steps_is_over_before_its_recorder_hears_of_it() -> None:
    """The recorder took the rest of it over, with the lane locked: its thread waited for itself."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{}, {"operation": "broadcast", "payload": "text"}]}]}'
    )
    for seed in range(20):
        found, _ = complaints(program, seed, schedule=PCT())
        assert not found, found


async def told_who_left(rank: int) -> None:
    """Rank 0 leaves, and all others are told so; each of them leaves then."""
    await ac.all_reduce(1, lane="open")
    if rank > 0:
        for lane in ("open", "new"):
            with pytest.raises(ac.PeerLostError) as caught:
                await ac.all_reduce(torch.ones(3), lane=lane)
            assert caught.value.ranks == (0,), str(caught.value)
            assert str(caught.value).count("has left its world") == 1, str(caught.value)
    ac.finalize()


def test_who_comes_late_is_told_who_left_first() -> None:
    """Not who left because of that, either."""
    for seed in range(10):
        report = simulate(told_who_left, world_size=3, seed=seed, faults=[Stop(1, seconds=4.0, after_call=1)])
        report.check()
    explore(told_who_left, seeds=range(60), world_size=5, faults=stopped).check()


async def closed_in_a_block(rank: int) -> None:
    """What was put off on the lane is sent before the lane is closed."""
    with ac.coalescing():
        work = ac.all_reduce(torch.ones(3), lane="brief")
        ac.close_lane("brief")
        again = ac.all_reduce(torch.ones(2), lane="brief")
    assert (await work).tolist() == [3.0] * 3
    assert (await again).tolist() == [3.0] * 2


def test_a_lane_is_closed_inside_a_coalescing_block() -> None:
    explore(closed_in_a_block, seeds=range(40), world_size=3, shrink_seconds=0).check()


def stopped(chance: object, world_size: int) -> list[Stop]:
    """One rank that is late by seconds."""
    return [Stop(world_size - 1, seconds=3.0, after_call=1)]

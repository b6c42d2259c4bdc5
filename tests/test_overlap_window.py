"""Back-pressure: the amount in flight is bounded, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import asynccoll as ac
import oracle
from overlapping import SMALL, batch, close, loss_of, network
from ranks import Rank, raising
from worlds import World

SIZE = 1000  # floats: 4,000 bytes each


@dataclass
class Batch:
    """A tree node of another kind."""

    x: torch.Tensor
    count: int


async def started(me: Rank, window: ac.overlap.InFlight, turn: int) -> ac.Work[torch.Tensor]:
    x = torch.full((SIZE,), float(turn))
    if me.runner == "blocking":
        return window.start_blocking(ac.all_reduce, x, op="avg", lane="bounded")
    return await window.start(ac.all_reduce, x, op="avg", lane="bounded")


async def bounded(me: Rank) -> None:
    works = []
    with ac.overlap.InFlight(max_in_flight_bytes=3 * 4 * SIZE) as window:
        for turn in range(8):
            works.append(await started(me, window, turn))
            assert window.in_flight_bytes <= 3 * 4 * SIZE
            assert all(work.done() for work in works[:-3]), "what is no longer counted is over"
        if me.runner != "blocking":
            await window.drain()
    assert window.in_flight_bytes == 0
    for turn, work in enumerate(works):
        assert work.done()
        oracle.same(work.result(), torch.full((SIZE,), float(turn)))


def test_so_much_and_no_more(world: World, runner: str) -> None:
    """The oldest are waited for; leaving the block waits for the rest; results stay available."""
    world.run(bounded, runner=runner)


async def waits_for_room(me: Rank) -> None:
    window = ac.overlap.InFlight(max_in_flight_bytes=4 * SIZE)
    tree = {"a": torch.ones(SIZE), "b": [torch.ones(SIZE), 5]}
    alone = await window.start(ac.all_reduce, tree)  # larger than the window, so it goes alone
    assert window.in_flight_bytes == 2 * 4 * SIZE
    if me.rank == 0:
        second = await window.start(ac.all_reduce, torch.ones(SIZE))
        assert alone.done(), "there is no room beside it"
        me.show("second started")
    else:
        me.see("second started")
        second = await window.start(ac.all_reduce, torch.ones(SIZE))
    oracle.same((await alone)["b"][0], torch.full((SIZE,), float(me.size)))
    await second


def test_larger_than_the_window(pair: World) -> None:
    pair.run(waits_for_room, runner="asyncio")


async def counted(me: Rank) -> None:
    window = ac.overlap.InFlight(max_in_flight_bytes=4 * SIZE)
    alone = window.start_blocking(
        ac.all_reduce, {"a": Batch(torch.ones(SIZE), 5), "b": (None, torch.ones(1))}
    )
    assert window.in_flight_bytes == 4 * SIZE + 4
    assert alone.wait()["a"].count == 5 * me.size
    itself: list[object] = [torch.ones(1)]
    itself.append(itself)
    with raising(ac.InvalidArgumentError, "contains itself"):
        window.start_blocking(ac.all_reduce, itself)
    window.wait()


def test_the_tensors_of_any_tree_are_counted(pair: World) -> None:
    """A call with a tree that cannot be sent is refused, and other ranks are told."""
    pair.run(counted, runner="blocking")


async def late(me: Rank) -> None:
    window = ac.overlap.InFlight(max_in_flight_bytes=4 * SIZE)
    if me.rank == 0:
        first = await window.start(ac.all_reduce, torch.ones(SIZE), timeout=0.1)
        with raising(ac.CollectiveTimeoutError):
            await window.start(ac.all_reduce, torch.ones(SIZE))
        assert window.in_flight_bytes == 4 * SIZE, "it is still out"
        me.show("gave up")
        first.detach()
    else:
        me.see("gave up")
        ac.all_reduce(torch.ones(SIZE)).wait()


def test_a_late_operation_is_an_error_of_the_next_start(pair: World) -> None:
    """Nothing is started beyond the limit."""
    pair.run(late, runner="asyncio")


async def in_backward(me: Rank) -> None:
    ours, twin = network(), network()
    with ac.overlap_gradients(ours, max_in_flight_bytes=800, **SMALL) as gradients:
        for step in range(3):
            ours.zero_grad()
            loss_of(ours, batch(me.rank, step)).backward()
            await me.get(gradients)
            twin.zero_grad()
            loss_of(twin, batch(me.rank, step)).backward()
            for mine, its in zip(ours.parameters(), twin.parameters(), strict=True):
                assert close(mine.grad, ac.all_reduce(its.grad, op="avg").wait())


def test_backward_under_back_pressure(world: World) -> None:
    """The gradients are unchanged."""
    world.run(in_backward, runner="blocking")


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_refused(limit: object) -> None:
    with raising(ac.InvalidArgumentError, "max_in_flight_bytes"):
        ac.overlap.InFlight(limit)
    with raising(ac.InvalidArgumentError, "max_in_flight_bytes"):
        ac.overlap_gradients(network(), max_in_flight_bytes=limit)

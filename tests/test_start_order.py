"""One start order for all lanes, on devices that need one."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll.order.start_order import StartOrder
from asynccoll.runtime import process as runtime
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion
from ranks import Rank
from worlds import World, fresh

LANES = ("left", "right", "middle")
ROUNDS = 6


async def opposite_orders(me: Rank) -> list[str]:
    """Each rank starts its lanes in another order; the order of native starts is recorded."""
    context = runtime.current()
    context.backend.orders_lanes = True  # gloo needs no start order; nccl does, and uses the same code
    started: list[str] = []
    for name in LANES:
        lane = context.world.lane(name)
        drive = lane.queue._advance

        def recorded(job: object, drive: object = drive, name: str = name) -> None:
            started.append(name)
            drive(job)  # type: ignore[operator]  # the method that was replaced

        lane.queue._advance = recorded  # type: ignore[method-assign,assignment]  # a spy on the real one

    async def child(name: str, value: float) -> None:
        for turn in range(ROUNDS):
            total = await ac.all_reduce(torch.tensor([value + turn]), lane=name)
            assert total.item() == (value + turn) * me.size

    order = LANES[me.rank % 3 :] + LANES[: me.rank % 3]
    async with anyio.create_task_group() as tasks:
        for name in order:
            tasks.start_soon(child, name, float(LANES.index(name)))
    return started


def test_lanes_start_in_one_order() -> None:
    """Ranks that issue on three lanes in three different orders start them in the same one."""
    with fresh("gloo", 3) as world:
        results = world.run(opposite_orders, runner="asyncio", timeout=15)
    assert len(results[0]) == len(LANES) * ROUNDS
    assert results[0] == results[1] == results[2]


async def closed_in_flight(me: Rank) -> list[float]:
    """Rank 0 makes its call, and closes the lane, after the others have done both."""
    context = runtime.current()
    context.backend.orders_lanes = True
    totals = []
    for life in range(3):
        if me.rank == 0:
            for rank in range(1, me.size):
                me.see(f"{rank} closed {life}")
        work = ac.all_reduce(torch.tensor([1.0 + life]), lane="short")
        ac.close_lane("short")
        me.show(f"{me.rank} closed {life}")
        totals.append((await work).item())
    assert "short" not in context.world.opened, "a lane was opened that nobody has used"
    return totals


def test_a_lane_that_is_closing_still_passes() -> None:
    """Calls in flight on it are still admitted, and its name can be used again."""
    with fresh("gloo", 3) as world:
        results = world.run(closed_in_flight, timeout=15)
    assert results == [[3.0, 6.0, 9.0]] * 3


async def broken_in_its_turn(me: Rank) -> int:
    context = runtime.current()
    context.backend.orders_lanes = True

    def program(communicator: Communicator) -> Generator[Completion, None, Completion]:
        yield communicator.barrier()
        return communicator.barrier()

    left = context.world.lane("left")
    left.run("waits", program)
    left.break_off(ac.CollectiveError("it cannot go on"))
    return await ac.all_reduce(1, lane="right", timeout=10)


def test_a_lane_that_breaks_off_in_its_turn_passes_it() -> None:
    """The lane's first call has been admitted, or will be; the other lanes must not wait for it forever."""
    with fresh("gloo", 2) as world:
        assert world.run(broken_in_its_turn, runner="asyncio", timeout=30) == [2, 2]


async def closed_where_it_broke(me: Rank) -> int:
    """Rank 0 makes a call on a lane that its peer has closed since the lane broke off there."""
    context = runtime.current()
    context.backend.orders_lanes = True
    await ac.all_reduce(1, lane="left")
    if me.rank:
        lane = context.world.lane("left")
        lane.break_off(ac.CollectiveError("it cannot go on"))
        ac.close_lane("left")
        context.world._join_closers()
        stands = context.world.find_queue("left", lane.key)
        assert stands is not lane.queue, "a job that goes on would keep all lanes that have broken off"
        assert stands is not None
        me.show("closed")
    else:
        me.see("closed")
        ac.all_reduce(1, lane="left").detach()
    return await ac.all_reduce(1, lane="right", timeout=10)


def test_a_lane_that_broke_off_and_is_closed_passes_its_turns() -> None:
    with fresh("gloo", 2) as world:
        assert world.run(closed_where_it_broke, runner="asyncio", timeout=30) == [2, 2]


def test_ctrl_c_in_an_announcement_leaves_it_to_the_next() -> None:
    """The followers may or may not have got it: they get the same again, and the turn is not lost."""
    told: list[tuple[list[str], list[str]]] = []
    admitted: list[int] = []

    def multi_set(keys: list[str], values: list[str]) -> None:
        told.append((keys, values))
        if len(told) == 1:
            raise KeyboardInterrupt

    lane: Any = SimpleNamespace(name="a", key="a", next_epoch_to_start=lambda: 5, admit=admitted.append)
    clients: Any = SimpleNamespace(take=lambda: SimpleNamespace(multi_set=multi_set))
    order = StartOrder(cast("Any", SimpleNamespace(rank=0, size=3, key="world")), clients)
    with pytest.raises(KeyboardInterrupt):
        order.request(lane)
    order.request(lane)
    assert admitted == [5]
    assert told[0] == told[1]
    order.release()
    assert admitted == [5, 5]
    assert told[2] != told[1]


def test_without_the_need_there_is_no_start_order(pair: World) -> None:
    """gloo's lanes need no agreement, and do not pay for one."""
    pair.run(unordered)


async def unordered(me: Rank) -> None:
    assert runtime.current().world.start_order("eval") is None

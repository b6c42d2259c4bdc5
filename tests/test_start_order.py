"""One start order for all lanes, on devices that need one."""

from __future__ import annotations

import json
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
from asynccoll.transport.completion import Completion, Promise
from ranks import Rank
from struck import Struck, nth
from worlds import fresh

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


class FakeLane:
    """The queue of a lane: every operation ends when ``end`` is called."""

    def __init__(self, name: str) -> None:
        self.name = self.key = name
        self.queued = 0
        self.turns: list[Promise] = []

    def next_epoch_to_start(self) -> int | None:
        return 0 if self.queued else None

    def admit(self, epoch: int, turn: Promise) -> None:
        if turn not in self.turns:
            self.turns.append(turn)
            self.queued -= 1

    def end(self) -> None:
        self.turns[-1].settle()


class AnnouncingStore:
    """A store that notes what it is told, and where Ctrl-C strikes once, behind that."""

    def __init__(self) -> None:
        self.struck = False
        self.announced: dict[str, str] = {}

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.announced.update(zip(keys, values, strict=True))
        if self.struck:
            self.struck = False
            raise KeyboardInterrupt


def leading() -> tuple[StartOrder, AnnouncingStore]:
    store = AnnouncingStore()
    group = SimpleNamespace(rank=0, size=2, key="some")
    return StartOrder(cast("Any", group), cast("Any", SimpleNamespace(take=lambda: store))), store


def test_ctrl_c_as_the_next_start_is_announced_loses_no_turn() -> None:
    """It strikes as another lane's operation ends, after which nobody might ask again."""
    order, store = leading()
    first, second = FakeLane("first"), FakeLane("second")
    for lane in (first, second):
        lane.queued += 1
        order.request(lane)
    store.struck = True
    with pytest.raises(KeyboardInterrupt):
        first.end()
    assert len(second.turns) == 1
    assert [json.loads(said)[0] for said in store.announced.values()] == ["first", "second"]


@pytest.mark.parametrize("when", ["taken", "released"])
def test_ctrl_c_at_any_lock_of_the_start_order_loses_no_turn(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    struck = 0
    for use in range(1, 8):
        order, store = leading()
        lanes = [FakeLane("first"), FakeLane("second")]
        with monkeypatch.context() as patch:
            patch.setattr(order, "_lock", Struck(nth(use), when=when))
            for lane in lanes:
                lane.queued += 1
                try:
                    order.request(lane)
                except KeyboardInterrupt:
                    struck += 1
            try:
                lanes[0].end()
            except KeyboardInterrupt:
                struck += 1
        assert [len(lane.turns) for lane in lanes] == [1, 1], f"at use {use}"
        assert [json.loads(said)[0] for said in store.announced.values()] == ["first", "second"]
        lanes[1].end()
        lanes[0].queued += 1
        order.request(lanes[0])
        assert len(lanes[0].turns) == 2, f"at use {use}"
    assert struck >= 5

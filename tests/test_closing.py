"""Closing lanes: their names and resources can be used again."""

from __future__ import annotations

import os

import anyio
import pytest
import torch

import asynccoll as ac
import oracle
from asynccoll.runtime.process import current
from asynccoll.waiting.children import MANY_NAMES
from patience import patient
from ranks import LANES, Rank, raising
from worlds import World


async def many(me: Rank) -> None:
    with me.usual_room():
        for turn in range(LANES + 3):
            name = f"many {turn}"
            await me.check(name, ac.all_reduce, turn, lane=name, expect=turn * me.size)
            ac.close_lane(name)


def test_closed_lanes_make_room(several: World) -> None:
    """One after the other, more lanes are used than a group may have at a time."""
    several.run(many, runner="asyncio", timeout=patient(60))


async def put_off(me: Rank) -> None:
    with ac.coalescing():
        works = [ac.all_reduce(torch.ones(1), lane=one) for one in ("put off", ac.backward_lane("put off"))]
        ac.close_lane("put off")
    assert [(await me.get(work)).item() for work in works] == [me.size, me.size]


def test_what_a_block_has_put_off_on_both_lanes_is_sent_first(pair: World) -> None:
    """The backward lane's used to be sent once it was closed: on a new lane on which ranks never met."""
    pair.run(put_off)


async def anew(me: Rank) -> None:
    """Rank 0 has closed the lane and used the next one of that name before the others close the first."""
    last = ac.broadcast(10, src=0, lane="anew") if me.rank == 0 else None
    if last is not None:
        ac.close_lane("anew")
        first = ac.broadcast(20, src=0, lane="anew")
        me.show("anew")
        assert (await me.get(last), await me.get(first)) == (10, 20)
    else:
        me.see("anew")
        with me.case("before"):
            oracle.same(await me.get(ac.broadcast(0, src=0, lane="anew")), 10)
        ac.close_lane("anew")
        with me.case("after"):
            oracle.same(await me.get(ac.broadcast(0, src=0, lane="anew")), 20)
    await me.check("both", ac.all_reduce, 3, lane="anew", expect=3 * me.size)
    ac.close_lane("anew")


def test_a_name_is_used_anew_while_others_still_use_it(several: World, runner: str) -> None:
    """Ranks close it at different times: calls of the first and the second lane do not match each other."""
    several.run(anew, runner=runner, timeout=patient(30))


async def prepared(me: Rank) -> None:
    with me.case("default"), raising(ac.InvalidArgumentError, "default"):
        ac.close_lane("default")
    ac.close_lane("never used")
    await me.check("all closed it", ac.all_reduce, 1, lane="never used", expect=me.size)
    ac.close_lane("never used")


def test_what_cannot_be_closed_and_what_was_never_opened(several: World) -> None:
    """The default lane lives as long as its group and cannot be closed."""
    several.run(prepared, runner="asyncio")


# ---------------------------------------------------------------- children of task groups

#: Far more than the lanes a group of ranks may have.
CHILDREN = 100


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


async def new_names(me: Rank, at_once: int) -> list[tuple[int, int]]:
    """Return the threads and descriptors while children with ever new names run in a group that stays."""
    pair = ac.new_group([0, me.size - 1])
    room = anyio.Semaphore(at_once)
    seen = []

    async def child(turn: int) -> None:
        async with room:
            assert await ac.all_reduce(turn) == turn * me.size
            if me.rank in pair.ranks:
                assert await ac.all_reduce(turn, group=pair) == 2 * turn
            seen.append(resources())

    async with ac.create_task_group() as tasks:
        turns = range(CHILDREN)
        for turn in turns if at_once == 1 or me.rank % 2 else (n ^ 1 for n in turns):
            tasks.start_soon(child, turn, name=f"{at_once} {turn}")
    return seen


@pytest.mark.parametrize("at_once", [1, 8])
def test_children_may_have_new_names_for_ever(several: World, at_once: int) -> None:
    """The lanes of ended children are closed in each group of ranks while their task group still runs."""
    if several.size > 3:
        return
    for seen in several.run(new_names, at_once, runner="asyncio", timeout=patient(90)):
        assert len(seen) == CHILDREN
        early, late = seen[: CHILDREN // 2], seen[CHILDREN // 2 :]
        for kind, what in enumerate(("threads", "descriptors")):
            least, most = max(each[kind] for each in early), max(each[kind] for each in late)
            assert most <= least + 16, f"{most} {what} where there were {least}"


async def one_name(name: str, result: int) -> None:
    async def child() -> None:
        assert await ac.all_reduce(1) == result

    async with ac.create_task_group() as tasks:
        tasks.start_soon(child, name=name)


async def again(me: Rank) -> None:
    opened, mine = current().world.opened, f"parent on {me.runner}"
    for _ in range(3):
        await one_name("again", me.size)
    kept = opened["default/again"]
    await one_name("again", me.size)
    with me.case("a name that comes again keeps its lane"):
        assert opened["default/again"] is kept

    async def parent(turn: int) -> None:
        for _ in range(3):
            await one_name("below", me.size)
        assert f"default/{mine} {turn}/below" in opened

    for turn in range(LANES + 3):
        async with ac.create_task_group() as tasks:
            tasks.start_soon(parent, turn, name=f"{mine} {turn}")
    with me.case("the lanes of a child's children go with its own"):
        assert not [name for name in opened if name.startswith(f"default/{mine}")]


def test_a_name_that_comes_again_keeps_its_lane(pair: World, loop: str) -> None:
    """A task group that is created anew at each step opens no new connections."""
    pair.run(again, runner=loop, timeout=patient(60))


async def many_again(me: Rank) -> None:
    """Run rounds of recurring names: each in its own task group, then many in one task group."""

    async def child(turn: int) -> None:
        assert await ac.all_reduce(turn) == turn * me.size

    names = [f"{turn} of many" for turn in range(LANES + 3)]
    for _ in range(3):
        for name in names:
            await one_name(name, me.size)
    order = list(enumerate(names))
    for _ in range(3):
        for part in (order[:9], order[9:30], order[30:]):
            async with ac.create_task_group() as tasks:
                for turn, name in part if me.rank % 2 else reversed(part):
                    tasks.start_soon(child, turn, name=name)
    with me.case("left open"):
        assert len([name for name in current().world.opened if name.endswith("of many")]) <= MANY_NAMES


def test_many_names_that_come_again_make_room(several: World) -> None:
    """If recurring names were always kept, they would use up the lanes of others."""
    several.run(many_again, runner="asyncio", timeout=patient(60))

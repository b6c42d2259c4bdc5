"""Lanes that are closed: their names and their room can be used again."""

from __future__ import annotations

import asynccoll as ac
import oracle
from asynccoll.group import MAX_LANES
from patience import patient
from ranks import Rank, raising
from worlds import World


async def many(me: Rank) -> None:
    for turn in range(MAX_LANES + 3):
        name = f"many {turn}"
        await me.check(name, ac.all_reduce, turn, lane=name, expect=turn * me.size)
        ac.close_lane(name)


def test_closed_lanes_make_room(several: World) -> None:
    """More lanes, one after the other, than a group may have at once."""
    several.run(many, runner="asyncio", timeout=patient(60))


async def anew(me: Rank) -> None:
    """Rank 0 is through with the lane, and with the next of that name, before the others close the first."""
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
    """Ranks close it at different times: the calls of the first and the second lane do not meet."""
    several.run(anew, runner=runner, timeout=patient(30))


async def prepared(me: Rank) -> None:
    with me.case("default"), raising(ac.InvalidArgumentError, "default"):
        ac.close_lane("default")
    ac.close_lane("never used")
    await me.check("all closed it", ac.all_reduce, 1, lane="never used", expect=me.size)
    ac.close_lane("never used")


def test_what_cannot_be_closed_and_what_was_never_opened(several: World) -> None:
    """The default lane lives as long as its group."""
    several.run(prepared, runner="asyncio")

"""What one rank does for all ranks: is_main, print0, main_first."""

from __future__ import annotations

import contextlib
import io

import asynccoll as ac
from ranks import Rank, raising
from worlds import World


async def printed(me: Rank) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ac.print0("epoch", 1, sep="=", end="!")
    with me.case("main"):
        assert ac.is_main() is (me.rank == 0)
        assert ac.is_main(local=True) is (ac.get_local_rank() == 0)
    return said.getvalue()


def test_print0(world: World) -> None:
    """Rank 0 prints, as print does."""
    assert world.run(printed) == ["epoch=1!", *[""] * (world.size - 1)]


async def in_turn(me: Rank, sign: str) -> None:
    if me.runner == "blocking":
        with ac.main_first():
            _first(me, sign)
    else:
        async with ac.main_first():
            _first(me, sign)
    with ac.main_first(local=True):
        _first(me, f"{sign} again")
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def _first(me: Rank, sign: str) -> None:
    with me.case(sign):
        assert me.shown(sign) is (me.rank != 0)
    if me.rank == 0:
        me.show(sign)


def test_main_first(world: World, runner: str) -> None:
    """The others enter the block once rank 0 has left it."""
    world.run(in_turn, f"written for {runner}", runner=runner)


async def failing(me: Rank) -> None:
    entered = False
    error = OSError if me.rank == 0 else ac.PeerRefusedError
    with me.case("first"), raising(error, "no space left"):
        async with ac.main_first():
            entered = True
            raise OSError("no space left")
    with me.case("entered"):
        assert entered is (me.rank == 0)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_what_fails_first_is_told(several: World) -> None:
    """The other ranks get the reason, and do not enter the block; the lane keeps working."""
    several.run(failing)


async def failing_later(me: Rank) -> None:
    with me.case("second"), contextlib.ExitStack() as stack:
        if me.rank:
            stack.enter_context(raising(ValueError, "mine"))
        async with ac.main_first():
            if me.rank:
                raise ValueError("mine")
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_what_fails_later_is_its_own(several: World) -> None:
    """No rank waits for a rank that enters later."""
    several.run(failing_later)

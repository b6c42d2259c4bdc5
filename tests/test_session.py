"""``ac.session``: the world of a block, whose event loop keeps running while ranks wait for each other."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
import worlds
from asynccoll.backends import choosing
from asynccoll.runtime.process import current
from ranks import Rank, raising
from worlds import World


@pytest.fixture(scope="module")
def bare() -> World:
    """Two processes that have not called initialize."""
    return worlds.world("gloo", 2, bare=True)


async def joined(me: Rank, path: str, memory: bool) -> int:
    """Rank 0 enters only after rank 1's event loop has run while rank 1 waits for it."""
    turned, sign = 0, f"turned in {Path(path).parent.name}"
    entered = anyio.Event()

    async def turn() -> None:
        nonlocal turned
        while not entered.is_set():
            await anyio.sleep(0.001)
            turned += 1
            if turned == 5 and me.rank == 1:
                me.show(sign)

    if me.rank == 0:
        me.see(sign)
    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        async with ac.session(
            "gloo", init_method=f"file://{path}", rank=me.rank, world_size=2, memory=memory
        ):
            entered.set()
            total = await ac.all_reduce(me.rank + 1)
    with me.case("left"):
        assert not ac.is_initialized()
    return total


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_the_loop_turns_while_the_others_are_awaited(
    bare: World, tmp_path: Path, loop: str, memory: bool
) -> None:
    assert bare.run(joined, str(tmp_path / "meet"), memory, runner=loop, timeout=60.0) == [3, 3]


async def asked_where_it_is(me: Rank, path: str) -> str:
    """Rank 1 joins in a thread and then computes in a task of its event loop."""
    async with ac.session("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2):
        await ac.barrier()
        if me.rank == 1:
            me.show("computes")
            me.see("asked")
            await ac.barrier()
            return ""
        me.see("computes")
        work = ac.barrier()
        found = str(ac.who_is_missing(work))
        me.show("asked")
        await work
    return found


def test_where_a_rank_is_that_has_joined_in_a_thread_is_told(bare: World, tmp_path: Path) -> None:
    text, _ = bare.run(asked_where_it_is, str(tmp_path / "meet"), runner="asyncio", timeout=60.0)
    assert "has not called barrier #2" in text
    assert "it is now in " in text


def left_by_an_error(me: Rank, path: str) -> None:
    """The block raises on rank 0, and no rank waits for calls that will never be made."""
    expected = ValueError if me.rank == 0 else ac.PeerLostError
    world = ac.session("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2)
    with me.case("left"), raising(expected, "" if me.rank else "planted"), world:
        ac.barrier().wait()
        if me.rank == 0:
            raise ValueError("planted")
        ac.all_reduce(1).wait()
    with me.case("after"):
        assert not ac.is_initialized()


def test_a_block_that_raises_leaves_at_once(bare: World, tmp_path: Path) -> None:
    bare.run(left_by_an_error, str(tmp_path / "meet"), timeout=60.0)


async def told_why(me: Rank, path: str) -> None:
    """A thread leaves the world for the event loop, and has no current exception of its own."""
    expected = ValueError if me.rank == 0 else ac.PeerLostError
    with me.case("told"), raising(expected, "ValueError: bad batch" if me.rank else "bad batch"):
        async with ac.session("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2):
            await ac.barrier()
            if me.rank == 0:
                raise ValueError("bad batch")
            await ac.all_reduce(1)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_the_others_are_told_what_a_block_raised(bare: World, tmp_path: Path, loop: str) -> None:
    bare.run(told_why, str(tmp_path / "meet"), runner=loop, timeout=60.0)


def test_a_world_of_one_by_default() -> None:
    """It refuses what ``initialize`` refuses."""
    with ac.session() as same:
        assert isinstance(same, ac.session)
        assert ac.get_world_size() == 1
        with pytest.raises(ac.InvalidArgumentError, match="already initialized"):
            ac.initialize()
    assert not ac.is_initialized()
    with pytest.raises(ac.InvalidArgumentError, match="timeout"), ac.session(timeout=-1.0):
        pass


def left_by_exit(me: Rank, path: str, code: int) -> str:
    """Rank 0 exits with a broadcast in flight; the exit code decides whether it completes."""
    x = torch.full((1 << 22,), float(1 - me.rank))
    try:
        with ac.session("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2):
            ac.barrier().wait()
            if me.rank == 0:
                ac.broadcast(x, src=0).detach()
                me.show("sends")
                sys.exit(code)
            me.see("sends")
            return str(float(ac.broadcast(x, src=0).wait(timeout=20.0).min()))
    except SystemExit:
        return "exits"
    except ac.PeerLostError as error:
        return str(error)


def test_a_program_that_exits_with_0_leaves_its_world_in_order(bare: World, tmp_path: Path) -> None:
    assert bare.run(left_by_exit, str(tmp_path / "meet"), 0) == ["exits", "1.0"]
    _, heard = bare.run(left_by_exit, str(tmp_path / "again"), 3)
    assert "SystemExit: 3" in heard


def test_a_world_that_another_thread_has_joined_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: both threads joined one, and the process went on in the later."""
    create = choosing.create
    first: list[object] = []

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ac.initialize, "serial").result()
        first.append(current())
        return create(*args, **kwargs)

    monkeypatch.setattr(choosing, "create", late)
    try:
        with pytest.raises(ac.InvalidArgumentError, match="already initialized"):
            ac.initialize("serial")
        assert ac.all_reduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]
        assert first == [current()]
    finally:
        ac.finalize()

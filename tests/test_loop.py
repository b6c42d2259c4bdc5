"""The event loop while a collective is in flight: an await never blocks it."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
import torch
from blockbuster import BlockBuster, BlockingError

import asynccoll as ac
import oracle
import worlds
from ranks import Rank

TURNS = 20


@pytest.fixture(scope="module")
def gloo_pair() -> worlds.World:
    return worlds.world("gloo", 2)


async def _count_turns(me: Rank, sign: str) -> None:
    """Let the loop turn while the other rank waits for ``sign``; then show it."""
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
    await asyncio.to_thread(me.show, sign)


def _guard() -> BlockBuster:
    """Make a guard that raises at blocking calls, except the bounded inline wait of at most 1 ms a turn."""
    guard = BlockBuster()
    guard.functions["threading.Lock.acquire"].can_block_in("asynccoll/transport/completion.py", "wait")
    return guard


async def suspended(me: Rank) -> None:
    calls = {
        "all_reduce": lambda: ac.all_reduce(torch.ones(1000)),
        "number": lambda: ac.all_reduce(5),
        "object": lambda: ac.all_gather_object({"rank": me.rank}),
        "new lane": lambda: ac.all_reduce(torch.ones(2), lane="guarded"),
    }
    right = {
        "all_reduce": torch.full((1000,), 2.0),
        "number": 10,
        "object": [{"rank": 0}, {"rank": 1}],
        "new lane": torch.full((2,), 2.0),
    }
    for name, call in calls.items():
        sign = f"guarded {name}"
        with me.case(name):
            if me.rank == 1:
                me.see(sign)
                await call()
                continue
            guard = _guard()
            guard.activate()
            try:
                turns = asyncio.create_task(_count_turns(me, sign))
                work = call()
                assert not work.done()
                got = await work
                await turns
            finally:
                guard.deactivate()
            oracle.same(got, right[name])


def test_an_await_blocks_no_loop(gloo_pair: worlds.World) -> None:
    """Under a guard that raises at every blocking call, suspended awaits of each kind get their results."""
    gloo_pair.run(suspended, runner="asyncio")


async def _blocks() -> None:
    time.sleep(0.001)  # which the guard must find


def test_the_guard_finds_what_blocks() -> None:
    """This shows that the test above can fail: the same guard catches a sleep."""
    guard = _guard()
    guard.activate()
    try:
        with pytest.raises(BlockingError):
            asyncio.run(_blocks())
    finally:
        guard.deactivate()


async def due_meanwhile() -> bool:
    """Return whether a task that was due ran during an await that never needed to sleep."""
    asleep, woken = anyio.Event(), False

    async def sleeper() -> None:
        nonlocal woken
        asleep.set()
        await anyio.sleep(0.001)
        woken = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper)
        await asleep.wait()  # by now the task has set its timer
        time.sleep(0.01)  # the loop is held until the timer is due
        await ac.all_reduce(torch.ones(1))
        return woken


@pytest.mark.parametrize(
    ("backend", "options"),
    [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio", "uvloop", "trio"],
)
def test_who_is_due_has_run_before_the_loop_is_held_again(backend: str, options: dict[str, bool]) -> None:
    """A timer's callback and the task that it wakes take several rounds of a loop; one await lets all run."""
    for _ in range(5):
        assert anyio.run(due_meanwhile, backend=backend, backend_options=options)

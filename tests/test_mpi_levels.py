"""The mpi backend on a library that provides `MPI_THREAD_SERIALIZED`: slower, never wrong.

Needs mpi4py with an MPI library; the environments `mpich` and `openmpi` have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
import trio

import asynccoll as ac
import needs
import worlds
from patience import patient
from ranks import Rank

needs.need_package("mpi4py", "mpi", "`make mpi` has environments with mpi4py")


def join() -> None:
    """Call `initialize` in a process whose MPI takes one call at a time."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    ac.initialize("mpi", timeout=patient(30))


async def collectives(me: Rank, get: Callable[[Any], Awaitable[Any]], kind: str) -> None:
    """Make small and large calls, programs, calls of a group, on lanes in opposite order, and messages."""
    total = sum(range(me.size))
    assert await get(ac.all_reduce(me.rank)) == total
    x = torch.full((2 << 20,), float(me.rank))
    large = ac.all_reduce(x)
    assert await get(ac.all_gather({"a": x[:3], "n": str(me.rank)})) is not None
    assert float((await get(large))[-1]) == total
    assert await get(ac.all_gather_object({"rank": me.rank})) == [{"rank": r} for r in range(me.size)]
    lanes = [f"{kind} {index}" for index in range(4)]
    works = {
        name: ac.all_reduce(torch.tensor([float(index)]), lane=name)
        for index, name in (list(enumerate(lanes)) if me.rank else list(enumerate(lanes))[::-1])
    }
    for index, name in enumerate(lanes):
        assert (await get(works[name])).tolist() == [float(index * me.size)]
    pair = ac.new_group([0, 1])
    if me.rank < 2:
        assert await get(ac.all_reduce(10**me.rank, group=pair)) == 11
        sent = ac.send(torch.full((3,), float(me.rank)), dst=1 - me.rank)
        got = await get(ac.recv(torch.empty(3), src=1 - me.rank))
        await get(sent)
        assert got.tolist() == [1.0 - me.rank] * 3
    works_of_turns = [ac.all_reduce(turn) for turn in range(20)]
    assert [await get(work) for work in works_of_turns] == [turn * me.size for turn in range(20)]
    await get(ac.barrier())


async def blocked(work: Any) -> Any:
    return work.wait()


async def awaited(work: Any) -> Any:
    return await work


async def beside_a_thread(me: Rank) -> None:
    """A worker thread starts operations and waits for them, while this thread sleeps in its event loop."""
    await ac.barrier()
    for _ in range(3):
        got = await asyncio.to_thread(lambda: ac.all_gather_object(me.rank, lane="of a thread").wait())
        assert got == list(range(me.size))
    first = ac.all_reduce(1)
    second = ac.all_reduce(2, lane="another")
    done, _ = await asyncio.wait([first.as_future(), second.as_future()])
    assert sorted(one.result() for one in done) == [me.size, 2 * me.size]
    got = [await work async for work in ac.as_completed([ac.all_reduce(3), ac.all_reduce(3)])]
    assert got == [3 * me.size] * 2


def everything(me: Rank) -> None:
    for life in range(2):
        join()
        coroutine = collectives(me, blocked, f"blocking {life}")
        with pytest.raises(StopIteration):
            coroutine.send(None)
        asyncio.run(collectives(me, awaited, f"asyncio {life}"))
        trio.run(collectives, me, awaited, f"trio {life}")
        asyncio.run(beside_a_thread(me))
        ac.all_reduce(1).detach()
        ac.finalize()


def test_every_kind_of_call_where_mpi_takes_one_call_at_a_time() -> None:
    """Calls are made on asyncio, on trio, blocking and from another thread; lanes in any order."""
    with worlds.fresh("mpi", 3, bare=True) as world:
        world.run(everything, timeout=60)

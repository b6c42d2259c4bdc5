"""Operations that other libraries started, awaited as a work of ours."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
import oracle
from ranks import Rank, raising
from worlds import World


async def works_of_torch(me: Rank) -> None:
    group = ac.new_group(range(me.size)).process_group()
    x, y = torch.full((3,), float(me.rank + 1)), torch.arange(2.0) * me.rank
    handles = [dist.all_reduce(x, group=group, async_op=True), dist.broadcast(y, 1, group, async_op=True)]
    with me.case("a work"):
        assert await me.get(ac.adopt(handles[0])) is None
        oracle.same(x, torch.full((3,), me.size * (me.size + 1) / 2))
    with me.case("a list"):
        assert await me.get(ac.adopt(handles)) == [None, None]
        oracle.same(y, torch.arange(2.0))
    with me.case("the future of one"):
        x.fill_(me.rank)
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        (filled,) = await me.get(ac.adopt(future))
        oracle.same(filled, torch.full((3,), me.size * (me.size - 1) / 2))
        assert await me.get(ac.adopt(future.then(lambda done: done.value()[0].tolist()))) == filled.tolist()
    with me.case("messages, which have no future"):
        z = torch.zeros(2)
        handle = dist.isend(y, 1, group) if me.rank == 0 else dist.irecv(z, 0, group)
        if me.rank < 2:
            await me.get(ac.adopt(handle))
        if me.rank == 1:
            oracle.same(z, torch.arange(2.0))


def test_works_of_torch(pair: World, runner: str) -> None:
    """Adopted works of torch fill their tensors, on every event loop and without one."""
    pair.run(works_of_torch, runner=runner)


async def awaited_while_others_run(me: Rank) -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while not future.done():
            turns += 1
            if turns == 100:
                threading.Thread(target=future.set_result, args=(7,)).start()
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    work = ac.adopt(future)
    assert not work.done()
    assert await work == 7
    await counting
    assert turns >= 100


def test_the_loop_runs_meanwhile(pair: World) -> None:
    """Other tasks run until the adopted operation completes."""
    pair.run(awaited_while_others_run)


class Event:
    """The methods of torch.cuda.Event that adopting uses."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        raise AssertionError("nobody may block in it")


class Request:
    """The methods of mpi4py's Request that adopting uses."""

    def __init__(self, message: Any, asked: int) -> None:
        self.message, self.left = message, asked

    def Get_status(self) -> bool:  # noqa: N802  # mpi4py's name
        return False

    def test(self) -> tuple[bool, Any]:
        assert self.left >= 0, "tested after it was over"
        self.left -= 1
        return (True, self.message) if self.left < 0 else (False, None)


async def polled(me: Rank) -> None:
    with me.case("event"):
        assert await me.get(ac.adopt(Event(3))) is None
    with me.case("request"):
        assert await me.get(ac.adopt(Request({"a": 1}, 3))) == {"a": 1}
    with me.case("all"):
        future: torch.futures.Future[int] = torch.futures.Future()
        work = ac.adopt([Event(2), Request("b", 1), future])
        future.set_result(5)
        assert await me.get(work) == [None, "b", 5]


def test_events_and_requests_are_polled(pair: World, runner: str) -> None:
    """A thread polls events and requests until they complete; a list completes when all its items have."""
    pair.run(polled, runner=runner)


async def failing(me: Rank) -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("illegal memory access")

    with (
        me.case("event"),
        raising(ac.CollectiveError, "adopted Broken", "illegal memory", Path(__file__).name),
    ):
        await me.get(ac.adopt(Broken(0)))
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    with (
        me.case("late"),
        raising(ac.CollectiveTimeoutError, "adopted Future", "is not ready after", "await the same"),
    ):
        work = ac.adopt(future, timeout=0.05)
        await me.get(work)
    with me.case("its own error"), raising(LookupError, "lost"):
        future.set_exception(LookupError("lost"))
        await me.get(work)


def test_failures(pair: World, runner: str) -> None:
    """A polled operation that fails raises a collective's error, a future raises its own."""
    pair.run(failing, runner=runner)


def test_what_cannot_be_adopted() -> None:
    """The error names what can be adopted."""
    for wrong in (7, [7], asyncio.sleep, None):
        with pytest.raises(ac.PayloadTypeError, match="torch Work or Future"):
            ac.adopt(wrong)
    ours = ac.all_reduce(1)
    for wrong in (ours, [Event(1), ours]):
        with pytest.raises(ac.PayloadTypeError, match="is already a Work of asynccoll: await it directly"):
            ac.adopt(wrong)
    assert ours.wait() == 1
    with pytest.raises(ac.InvalidArgumentError, match="timeout"):
        ac.adopt(Event(1), timeout=0)


def test_nothing_at_all() -> None:
    """An empty list is complete."""
    assert ac.adopt([]).wait() == []

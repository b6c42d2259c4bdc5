"""Works that complete on the host while the device lags behind, on a stand-in device (``standin``).

What a device computes is compared with the same arithmetic in this process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccoll as ac
import standin
import worlds
from asynccoll.runtime import process as runtime
from ranks import Rank, raising
from worlds import World

_labels = itertools.count()


@pytest.fixture(params=[2, 3])
def behind(request: pytest.FixtureRequest) -> World:
    return worlds.world("gloo", request.param)


def lane_of_its_own() -> str:
    return f"streams {next(_labels)}"


def x_of(rank: int) -> torch.Tensor:
    return torch.arange(6.0) * (rank + 1) + 0.5


Call = Callable[[torch.Tensor, str], Any]
Right = Callable[[list[torch.Tensor]], torch.Tensor]

#: How a collective is called, and what it returns given what all ranks passed. The calls leave nothing to do
#: afterwards, encode what is sent, compute something afterwards, send several tensors as one, or fill
#: ``out``.
CALLS: dict[str, tuple[Call, Right]] = {
    "sum": (lambda x, lane: ac.all_reduce(x, lane=lane), sum),
    "in place": (lambda x, lane: ac.all_reduce(x, out=x, lane=lane), sum),
    "avg": (lambda x, lane: ac.all_reduce(x, op="avg", lane=lane), lambda xs: sum(xs) / len(xs)),
    "avg of bfloat16": (
        lambda x, lane: ac.all_reduce(x.bfloat16(), op="avg", lane=lane),
        lambda xs: (sum(x.bfloat16().float() for x in xs) / len(xs)).bfloat16(),
    ),
    "and": (
        lambda x, lane: ac.all_reduce(x > 2, op="and", lane=lane),
        lambda xs: torch.stack([x > 2 for x in xs]).all(0),
    ),
    "not in one piece": (
        lambda x, lane: ac.all_reduce(x.view(2, 3).t(), lane=lane),
        lambda xs: sum(x.view(2, 3).t() for x in xs),
    ),
    "all_gather": (
        lambda x, lane: ac.all_gather(x.view(2, 3), dim=1, lane=lane),
        lambda xs: torch.cat([x.view(2, 3) for x in xs], 1),
    ),
    "broadcast": (lambda x, lane: ac.broadcast(x, src=1, lane=lane), lambda xs: xs[1]),
    "tree": (
        lambda x, lane: ac.all_reduce({"a": x, "b": [x * 2]}, lane=lane).map(lambda t: t["a"] + t["b"][0]),
        lambda xs: sum(xs) * 3,
    ),
    "coalesced": (lambda x, lane: coalesced(x, lane=lane), lambda xs: sum(xs) * 3),
    "prepared": (lambda x, lane: ac.prepare("all_reduce", like=x, lane=lane).start(), sum),
}


def coalesced(x: torch.Tensor, *, lane: str) -> Any:
    with ac.coalescing():
        first, second = (ac.all_reduce(one, lane=lane) for one in (x, x * 2))
    second.detach()
    return first.map(lambda a: a + second.result())


async def followed_by_work(me: Rank, name: str, queued: bool) -> None:
    call, right = CALLS[name]
    with standin.device() as device:
        lane = lane_of_its_own()
        if not queued:
            await ac.barrier(lane=lane)
        x = x_of(me.rank)
        got = await call(x, lane)
        after = got.to(torch.float64) * 2  # a kernel of the user's, on the stream that awaited
        if not queued:
            assert device.behind, "the host has waited for the device"
        device.settle()
    assert torch.equal(after, right([x_of(rank) for rank in range(me.size)]).to(torch.float64) * 2)


@pytest.mark.parametrize("queued", [False, True], ids=["issued", "queued"])
@pytest.mark.parametrize("name", CALLS)
def test_what_follows_an_await_sees_its_result(behind: World, name: str, queued: bool) -> None:
    """The current stream is ordered after the operation, and the host does not wait for the device."""
    behind.run(followed_by_work, name, queued)


async def awaited_on_another_stream(me: Rank, finished: bool) -> None:
    op = "avg" if finished else "sum"
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        work = ac.all_reduce(x_of(me.rank).half() if finished else x_of(me.rank), op=op, lane=lane)
        first = await work
        with device.on(standin.Stream(device)):
            assert await work is first
            after = first.double() * 2
        device.settle()
    total = sum(x_of(rank).half().double() if finished else x_of(rank).double() for rank in range(me.size))
    assert torch.allclose(after, total * 2 / (me.size if finished else 1), rtol=1e-3 if finished else 0.0)


@pytest.mark.parametrize("finished", [False, True], ids=["as it came", "computed afterwards"])
def test_every_waiter_is_ordered_after_the_result(behind: World, finished: bool) -> None:
    """A second waiter, on a stream of its own, sees the result as well."""
    behind.run(awaited_on_another_stream, finished)


async def issued_by_another_thread(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        side = standin.Stream(device)
        with device.on(side):
            x = x_of(me.rank)
            work = ac.all_reduce(x, lane=lane)  # the lane opens in the background, and issues the call there
        got = await work
        after = got * 1
        device.settle()
        group = runtime.current().world.lane(lane).communicator.native("cpu")
    assert group.issued_on == [side]
    assert torch.equal(after, sum(x_of(rank) for rank in range(me.size)))


def test_a_queued_call_is_ordered_after_its_input(behind: World) -> None:
    """It runs after the work on its caller's stream, whichever thread issues it."""
    behind.run(issued_by_another_thread)


async def read_on_the_host(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        work = ac.all_reduce(x_of(me.rank), op="avg", lane=lane)
        device.go_once_asked(10**9)
        waiting = asyncio.create_task(work.on_host())
        while not device.asked:
            await asyncio.sleep(0)
        assert not waiting.done()
        device.go()  # called from the event loop, which on_host must not block
        got = (await waiting).tolist()
    mean = sum(x_of(rank) for rank in range(me.size)) / me.size
    assert got == mean.tolist()


def test_on_host_waits_for_the_device(behind: World) -> None:
    """The event loop keeps running meanwhile."""
    behind.run(read_on_the_host)


async def read_too_late(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        work = ac.all_reduce(x_of(me.rank), lane=lane, timeout=0.2)
        assert (await work) is (await work)
        for _ in range(2):
            with raising(ac.CollectiveTimeoutError, "on_host of all_reduce", "test_streams.py"):
                await work.on_host()
        device.settle()  # first, however long it takes, as this wait has only 0.2 seconds too
        got = (await work.on_host()).tolist()
    assert got == sum(x_of(rank) for rank in range(me.size)).tolist()


def test_on_host_has_a_deadline(behind: World) -> None:
    """The deadline is the operation's, and on_host can be awaited again."""
    behind.run(read_too_late)


async def spoilt(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        work = ac.all_reduce(x_of(me.rank), lane=lane)
        await work
        device.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
        with raising(ac.CollectiveError, "on_host of all_reduce", "illegal memory access"):
            await work.on_host()


def test_a_failed_kernel_is_a_typed_error_on_the_host(behind: World) -> None:
    """It is raised where the work is waited for, and no wait is endless."""
    behind.run(spoilt)


async def told_to_wait(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)

        def fails(_work: standin.GroupWork) -> bool:
            raise RuntimeError("Watchdog caught collective operation timeout")

        work = ac.all_reduce(x_of(me.rank), lane=lane)
        real, standin.GroupWork.wait = standin.GroupWork.wait, fails
        try:
            for _ in range(2):
                with raising(ac.CollectiveTimeoutError, "all_reduce #", lane):
                    await work
        finally:
            standin.GroupWork.wait = real
        device.go()


def test_what_the_library_raises_where_it_waits_is_typed(behind: World) -> None:
    """TORCH_NCCL_BLOCKING_WAIT has this effect: an await then blocks the host."""
    behind.run(told_to_wait)


def native_works() -> list[standin.GroupWork]:
    return [one for one in gc.get_objects() if type(one) is standin.GroupWork]


async def dropped(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        gc.collect()
        before = weakref.WeakSet(native_works())
        x = x_of(me.rank)
        work = ac.all_reduce(x, lane=lane)
        while not (begun := [one for one in native_works() if one not in before]):
            await asyncio.sleep(0)  # the lane may still be busy with earlier calls
        native = weakref.ref(begun.pop())
        work.detach()
        ac.all_reduce(x_of(me.rank), lane=lane).detach()  # a later work does not release this one
        del work, x
        gc.collect()
        assert native() is not None, "let go of while the device uses its memory"
        device.settle()
        ac.all_reduce(x_of(me.rank), lane=lane).detach()
        gc.collect()
        assert native() is None, "kept for good"
        device.settle()


def test_a_dropped_work_is_held_until_the_device_has_done_it(behind: World) -> None:
    """It is released at the next call after that."""
    behind.run(dropped)


async def captured(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        await ac.all_reduce(x_of(me.rank), lane=lane)
        device.asked, device.capturing = 0, True
        await ac.all_reduce(x_of(me.rank), lane=lane)
        await ac.all_reduce(x_of(me.rank), lane=lane)
        device.capturing = False
        assert device.asked == 0, "an event was asked, which ends a capture"
        device.settle()


def test_nothing_is_asked_of_the_device_while_a_graph_is_captured(behind: World) -> None:
    """Querying an event would invalidate the capture."""
    behind.run(captured)


async def closed_early(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        got = await ac.all_reduce(x_of(me.rank), lane=lane)
        device.go_once_asked(5)
        ac.close_lane(lane)
        while not device.closed:
            await asyncio.sleep(0.001)
        assert device.closed == [0], "its kernels were aborted"
    assert torch.equal(got, sum(x_of(rank) for rank in range(me.size)))


def test_a_lane_is_closed_once_the_device_has_done_its_calls(behind: World) -> None:
    """Closing a native group before that would abort its kernels."""
    behind.run(closed_early)


async def left_early(me: Rank) -> None:
    with standin.device() as device:
        await ac.barrier(lane="late")
        got = await ac.all_reduce(x_of(me.rank), lane="late")
        device.go_once_asked(5)
        ac.finalize()
        assert device.closed == [0], "its kernels were aborted"
    assert torch.equal(got, sum(x_of(rank) for rank in range(me.size)))


def test_finalize_waits_for_the_device() -> None:
    """Awaited results are right, however soon the program leaves."""
    with worlds.fresh("gloo", 2) as world:
        world.run(left_early)


async def refused_meanwhile(me: Rank) -> None:
    with standin.device() as device:
        lane = lane_of_its_own()
        await ac.barrier(lane=lane)
        before = await ac.all_reduce(x_of(me.rank), lane=lane)
        device.go_once_asked(5)
        if me.rank == 0:
            with raising(ac.PayloadTypeError):
                ac.all_reduce("no tensor", lane=lane)  # type: ignore[arg-type]  # which is the point
        else:
            with raising(ac.PeerRefusedError):
                await ac.all_reduce(x_of(me.rank), lane=lane).on_host()
        after = await ac.all_reduce(x_of(me.rank), lane=lane)
        device.settle()
    assert torch.equal(before, sum(x_of(rank) for rank in range(me.size)))
    assert torch.equal(after, before)


def test_a_refusal_takes_along_nothing_before_it(behind: World) -> None:
    """The device finishes earlier calls before the lost one is aborted, and on_host raises the error."""
    behind.run(refused_meanwhile)


async def lost_meanwhile(me: Rank) -> tuple[int, ...]:
    with standin.device() as device:
        await ac.barrier(lane="lost")
        if me.rank == 1:
            me.see("waits")
            os.kill(os.getpid(), signal.SIGKILL)
        device.go()
        work = ac.all_reduce(x_of(me.rank), lane="lost")
        await work  # the host has no way to know
        threading.Timer(0.0, me.show, ["waits"]).start()
        with raising(ac.PeerLostError) as caught:
            await work.on_host()
        device.settle()
    assert isinstance(caught.error, ac.PeerLostError)
    return caught.error.ranks


def test_a_lost_rank_is_named_where_the_host_waits() -> None:
    """The operation that the device waits for is aborted."""
    with worlds.fresh("gloo", 2) as world:
        results = world.run(lost_meanwhile, dies=[1], timeout=30)
        world.kill()
    assert results[0] == (1,)

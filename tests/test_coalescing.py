"""``ac.coalescing``: calls made one by one are sent together, and give the same results as if sent alone."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccoll as ac
import oracle
import worlds
from asynccoll.ops import coalescing
from asynccoll.order.lane import Lane
from asynccoll.runtime.process import current
from asynccoll.testing import explore
from patience import patient
from ranks import Rank, raising
from worlds import World


def _full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(value))


def _here() -> str:
    """Return the place of the caller's line, as errors show it."""
    return f"{__file__}:{sys._getframe(1).f_lineno}"


def _sequence() -> int:
    """Return how many places of the default lane's order are used."""
    return current().world.lane().sequence


async def mixed(me: Rank) -> None:
    n, total = me.size, sum(range(me.size))
    filled = torch.empty(2)
    before = _sequence()
    with ac.coalescing():
        sums = [ac.all_reduce(_full(me.rank + k, 3)) for k in range(20)]
        largest = ac.all_reduce(torch.tensor([me.rank, 7]), op="max")
        sent = ac.broadcast(_full(me.rank, 2, 2), src=n - 1)
        more = ac.all_reduce(torch.tensor(me.rank, dtype=torch.float64)).map(float)
        into = ac.all_reduce(_full(1, 2), out=filled)
        mean = ac.all_reduce(_full(me.rank, 2), op="avg", lane="side")
        assert not sums[0].done()
        assert "not sent" in repr(sums[0])
        assert _sequence() == before
    assert _sequence() == before + 1, "one place for all of the block on this lane"
    for k, work in enumerate(sums):
        oracle.same(await me.get(work), _full(total + k * n, 3))
    oracle.same(await me.get(largest), torch.tensor([n - 1, 7]))
    oracle.same(await me.get(sent), _full(n - 1, 2, 2))
    assert await me.get(more) == total
    assert await me.get(into) is filled
    oracle.same(filled, _full(n, 2))
    oracle.same(await me.get(mean), _full(total / n, 2))


def test_calls_of_every_kind_give_what_they_would_alone(world: World, runner: str) -> None:
    world.run(mixed, runner=runner)


async def sent_early(me: Rank) -> None:
    n = me.size
    async with ac.coalescing():
        first = ac.all_reduce(_full(1, 2))
        second = ac.all_reduce(_full(2, 2))
        oracle.same(await me.get(second), _full(2 * n, 2))  # awaiting sends the deferred calls
        oracle.same(first.result() if first.done() else await me.get(first), _full(n, 2))
        third = ac.all_reduce(_full(3, 2))
        gathered = ac.all_gather(me.rank)  # not one that can be coalesced: third is sent first
        assert "not sent" not in repr(third)
        prepared = ac.prepare("all_reduce", _full(6, 2))
        later = ac.all_reduce(_full(7, 2))
        started = prepared.start()
        assert "not sent" not in repr(later)
        with ac.coalescing():
            fourth = ac.all_reduce(_full(4, 2))
        fifth = ac.all_reduce(_full(5, 2))
        works = [first, third, fourth, fifth, started, later]
    assert await me.get(gathered) == list(range(n))
    for scale, work in zip((1, 3, 4, 5, 6, 7), works, strict=True):
        oracle.same(await me.get(work), _full(scale * n, 2))
    with ac.coalescing():
        pass


def test_awaiting_and_other_calls_inside_keep_the_order(world: World, runner: str) -> None:
    """Deferred calls are sent before any later call of another kind; blocks nest."""
    world.run(sent_early, runner=runner)


async def all_at_once(me: Rank) -> None:
    with ac.coalescing():
        works = [ac.all_reduce(_full(k, 2)) for k in range(5)]
        seen = [work.result()[0].item() async for work in ac.as_completed(works)]
    assert sorted(seen) == [float(k * me.size) for k in range(5)]
    with ac.coalescing():
        works = [ac.all_reduce(_full(k, 2)) for k in range(5)]
        called: list[object] = []
        works[0].add_done_callback(called.append)
    results = await ac.wait_all(works)
    assert [result[0].item() for result in results] == [float(k * me.size) for k in range(5)]
    assert called == [works[0]]


def test_with_the_functions_for_many_works(pair: World, loop: str) -> None:
    pair.run(all_at_once, runner=loop)


async def failing_everywhere(me: Rank) -> None:
    with raising(KeyError), ac.coalescing():
        lost = ac.all_reduce(_full(1, 2))
        mapped = lost.map(float)
        raise KeyError("mine")
    for work in (lost, mapped):
        with raising(ac.CollectiveError, "not sent", "KeyError"):
            await me.get(work)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


async def failing_on_one(me: Rank) -> None:
    if me.rank == 0:
        with raising(ZeroDivisionError), ac.coalescing():
            lost = ac.all_reduce(_full(1, 2))
            _ = 1 // (me.rank * 1)
        with raising(ac.CollectiveError, "not sent", "ZeroDivisionError"):
            await me.get(lost)
    else:
        with ac.coalescing():
            works = [ac.all_reduce(_full(1, 2)), ac.all_reduce(_full(2, 2))]
        for work in works:
            with raising(ac.PeerRefusedError, "rank 0", "ZeroDivisionError"):
                await me.get(work)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_a_block_that_fails_sends_nothing(pair: World, runner: str) -> None:
    """It may fail on all ranks or on one; then the others get an error instead of waiting."""
    pair.run(failing_everywhere, runner=runner)
    pair.run(failing_on_one, runner=runner)


async def refused_inside(me: Rank) -> None:
    with ac.coalescing():
        fine = ac.all_reduce(_full(1, 2))
        with raising(TypeError, "int64"):
            ac.all_reduce(torch.tensor([1]), op="avg")
        with raising(ValueError, "out"):
            ac.all_reduce(_full(1, 2), out=_full(1, 3))
    with raising(ac.PeerRefusedError, "refused its side"):
        await me.get(fine)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_what_is_refused_is_refused_at_the_call(pair: World, runner: str) -> None:
    """The rest of the block is lost as well, as no rank knows what the others have sent in its place."""
    pair.run(refused_inside, runner=runner)


@pytest.fixture(scope="session", params=worlds.BACKENDS)
def checked(request: pytest.FixtureRequest) -> World:
    """Return a world of two ranks with check="full"."""
    return worlds.world(request.param, 2, check="full")


async def mismatched(me: Rank) -> None:
    with ac.coalescing():
        works = [ac.all_reduce(_full(1, 2)) for _ in range(2 + me.rank)]
    for work in works:
        with raising(
            ac.CollectiveMismatchError, "rank 0", "rank 1", "float32 [2] [2] at", "float32 [2] [2] [2] at"
        ):
            await me.get(work)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_blocks_that_differ_between_ranks(checked: World) -> None:
    """With ``check="full"`` every work of the block raises a mismatch, on every rank."""
    checked.run(mismatched)


async def at_their_lines(me: Rank) -> None:
    def first_line() -> int:
        return sys._getframe(1).f_lineno

    shown = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(ac.coalescing())
        works, line = [ac.all_reduce(_full(1, 2)), ac.all_reduce(_full(1, 2))], first_line()
    shown.append((works[0].operations[0].place, line))
    async with ac.coalescing():
        work, line = ac.all_reduce(_full(1, 2)), first_line()
        await asyncio.gather(work)  # in a task that has no line of its own
    shown.append((work.operations[0].place, line))
    assert [place for place, _ in shown] == [(__file__, line) for _, line in shown]
    for work in works:
        oracle.same(await work, _full(me.size, 2))


def test_errors_show_the_first_call_of_what_travels_together(pair: World) -> None:
    """They do not show where the block ends, nor the call that ended it."""
    pair.run(at_their_lines)


async def cancelled(me: Rank) -> None:
    async def body() -> None:
        async with ac.coalescing():
            works.append(ac.all_reduce(_full(1, 2)))
            await asyncio.Event().wait()

    works: list[ac.Work[torch.Tensor]] = []
    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with raising(asyncio.CancelledError):
        await task
    with raising(ac.CollectiveError, "not sent"):
        await works[0]
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_a_cancelled_block_sends_nothing(pair: World) -> None:
    pair.run(cancelled)


async def with_gradients(me: Rank) -> None:
    xs = [_full(k, 2).requires_grad_() for k in range(3)]
    with ac.coalescing():
        works = [ac.all_reduce(x) for x in xs]
    results = [await me.get(work) for work in works]
    sum((k + 1) * y.sum() for k, y in enumerate(results)).backward()
    for k, x in enumerate(xs):
        oracle.same(x.grad, _full((k + 1) * me.size, 2))


def test_gradients(pair: World, runner: str) -> None:
    pair.run(with_gradients, runner=runner)


async def another_task(me: Rank) -> None:
    async def child() -> None:
        oracle.same(await ac.all_reduce(_full(2, 2), lane="child"), _full(2 * me.size, 2))

    async with ac.coalescing():
        mine = ac.all_reduce(_full(1, 2))
        await asyncio.create_task(child())
        assert "not sent" in repr(mine)
    oracle.same(await mine, _full(me.size, 2))


def test_tasks_started_inside_send_as_ever(pair: World) -> None:
    pair.run(another_task)


def until_settled(lane: Lane, epoch: int) -> None:
    """Wait until all ranks have said how far they got in ``epoch``: later, what was refused there is lost."""
    deadline = time.monotonic() + patient(10)
    while lane.epoch == epoch:
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def settled_inside(me: Rank) -> None:
    lane = current().world.lane()
    with ac.coalescing():
        works = [ac.all_reduce(_full(1, 2))]
        epoch = lane.epoch
        with raising(ac.InvalidArgumentError, "timeout"):
            ac.all_reduce(_full(1, 2), timeout=-1)
        until_settled(lane, epoch)  # all have refused it: the place is lost before the block ends
        works.append(ac.all_reduce(_full(1, 2)))
        works.append(ac.all_gather(_full(1, 2)))
    for work in works:
        with raising(ac.PeerRefusedError, "refused its side"):
            await me.get(work)
    assert await me.get(ac.all_reduce(1)) == me.size


def test_a_refusal_that_is_settled_inside_the_block_is_said_by_its_works(pair: World, runner: str) -> None:
    """As when it is settled after the block: leaving the block raises nothing in either case."""
    pair.run(settled_inside, runner=runner)


async def settled_in_between(me: Rank) -> None:
    lane = current().world.lane()
    epoch, resume, agreed, inside = lane.epoch, lane.halting.resume, threading.Event(), threading.Event()

    def later(*args: Any) -> Any:
        agreed.set()
        inside.wait()
        return resume(*args)

    lane.halting.resume = later  # type: ignore[method-assign]
    try:
        with raising(ac.InvalidArgumentError, "timeout"):
            ac.all_reduce(_full(1, 2), timeout=-1)
        assert agreed.wait(patient(10))
        with lane.together(lane.sequence):
            inside.set()
            until_settled(lane, epoch)
            works = [ac.all_reduce(_full(1, 2)), ac.all_reduce([_full(1, 2), 1]), ac.broadcast_object(1)]
    finally:
        inside.set()
        del lane.halting.resume
    for work in works:
        with raising(ac.PeerRefusedError, "refused its side"):
            await me.get(work)
    assert await me.get(ac.all_reduce(1)) == me.size


def test_a_refusal_that_is_settled_once_the_block_has_its_place(pair: World, runner: str) -> None:
    """Later calls at that place are lost, too: a faster rank has not sent them."""
    pair.run(settled_in_between, runner=runner)


#: What one rank calls instead of an ``all_reduce`` of a tensor; each is refused.
REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "reduction": lambda x: ac.all_reduce(x, op="nope"),
    "nothing": lambda x: ac.all_reduce(None),
    "timeout": lambda x: ac.all_reduce(x, timeout=-1),
    "leaf": lambda x: ac.all_reduce([x, object()]),
    "out": lambda x: ac.all_reduce(x, out=torch.ones(9)),
}


async def one_refused(me: Rank, caught: bool) -> None:
    total = float(sum(range(1, me.size + 1)))
    for who, (name, bad) in enumerate(REFUSED.items()):
        works = []
        refusals = (ac.InvalidArgumentError, ac.PayloadTypeError)
        with me.case(name), contextlib.suppress(*refusals), ac.coalescing():
            works.append(ac.all_reduce(torch.ones(4)))
            works.append(ac.all_reduce(torch.ones(4), op="max"))
            if me.rank == who % me.size:
                with contextlib.suppress(*((ac.InvalidArgumentError, ac.PayloadTypeError) if caught else ())):
                    bad(torch.ones(4))
            else:
                works.append(ac.all_reduce(torch.ones(4)))
            works.append(ac.all_reduce(torch.ones(4)))
            if caught:
                works.append(ac.all_gather(torch.ones(4)))
        with me.case(f"{name}: none of the block has a result"):
            for work in works:
                with pytest.raises(ac.CollectiveError):
                    await me.get(work)
        with me.case(f"{name}: what follows is in step"):
            for i in range(1, 4):
                oracle.same(
                    await me.get(ac.all_reduce(torch.full((i,), (me.rank + 1.0) * i))),
                    torch.full((i,), total * i),
                )


@pytest.mark.parametrize("caught", [False, True])
def test_a_call_that_one_rank_refuses_takes_its_block_along(pair: World, caught: bool) -> None:
    """Its peers send one fused call for the refused ones; neither matches what the other sends next."""
    pair.run(one_refused, caught)


async def prepared_refused(rank: int) -> None:
    """Rank 1 refuses to start the prepared call before any call of the block is sent."""
    x, y = _full(10 * rank, 4), _full(rank, 4)
    operation = ac.prepare("all_reduce", y)
    with ac.coalescing():
        work = ac.all_reduce(x)
        if rank == 1:
            with raising(ac.InvalidArgumentError, "no gradient"), torch.enable_grad():
                y.requires_grad_()
                operation.start()
            await asyncio.sleep(3)  # rank 0 hears of it while it waits on the other lane
        await ac.all_reduce(1, lane="other")
        started = operation.start() if rank == 0 else work
    for one in (work, started):
        with raising(ac.PeerRefusedError, "no gradient"):
            await one
    assert await ac.all_reduce(1) == 2


def test_a_prepared_call_shares_the_place_of_its_block() -> None:
    """Regression: rank 0's prepared call was summed with rank 1's call that it had deferred."""
    explore(prepared_refused, seeds=range(6), world_size=2).check()


async def prepared_again(me: Rank) -> None:
    x, n = _full(me.rank + 1, 4), me.size
    operation = ac.prepare("all_reduce", x)
    works = []
    with ac.coalescing():
        works.append(ac.all_reduce(_full(1, 3)))
        if me.rank == 0:
            works.append(operation.start())
        else:
            with raising(ac.InvalidArgumentError, "nonsense"):
                ac.all_reduce(x, op="nonsense")
    for work in works:
        with raising(ac.PeerRefusedError, "nonsense"):
            await me.get(work)
    for turn in range(2):
        with ac.coalescing():
            before, started = ac.all_reduce(_full(turn, 3)), operation.start()
            behind = ac.all_reduce(_full(turn + 1, 5))
        oracle.same(await me.get(before), _full(turn * n, 3))
        oracle.same(await me.get(started), _full(n * (n + 1) / 2, 4))
        oracle.same(await me.get(behind), _full(turn * n + n, 5))


def test_a_prepared_call_in_blocks_behind_one_that_was_refused(pair: World, runner: str) -> None:
    """It is sent with the block again, though the memory of its refused start may still be written to."""
    pair.run(prepared_again, runner=runner)


async def sent_before(me: Rank, everybody: bool) -> None:
    n = me.size
    for turn in range(12):
        with ac.coalescing():
            awaited = await me.get(ac.all_gather(_full(turn, 1)))
            first = ac.all_gather(_full(me.rank + turn, 2))
            second = ac.all_reduce([_full(1, 2), 1])
            put_off = ac.all_reduce(_full(1, 2))
            if everybody or me.rank == turn % n:
                with contextlib.suppress(ac.InvalidArgumentError):
                    ac.all_reduce(_full(1, 2), timeout=-1)
            else:
                ac.all_gather(_full(1, 2)).detach()
        oracle.same(awaited, torch.cat([_full(turn, 1)] * n))
        oracle.same(await me.get(first), torch.cat([_full(rank + turn, 2) for rank in range(n)]))
        oracle.same(await me.get(second), [_full(n, 2), n])
        with raising(ac.PeerRefusedError):
            await me.get(put_off)
    assert await me.get(ac.all_reduce(1)) == n


@pytest.mark.parametrize("everybody", [False, True])
def test_what_a_block_sent_before_a_refusal_stands_on_every_rank(several: World, everybody: bool) -> None:
    """Otherwise a rank with its result would continue and, in its backward, wait for ranks without theirs."""
    several.run(sent_before, everybody)


async def other_lanes(me: Rank) -> None:
    n, lane = me.size, current().world.lane()
    with ac.coalescing():
        epoch = lane.epoch
        gathered = ac.all_gather(_full(me.rank, 2))
        if me.rank == n - 1:
            with raising(ac.InvalidArgumentError, "timeout"):
                ac.all_reduce(_full(1, 2), timeout=-1)
        else:
            ac.all_reduce(_full(1, 2)).detach()
        first = ac.all_reduce(_full(me.rank + 1, 3), lane="other")
        if me.rank == n - 1:
            until_settled(lane, epoch)  # the others make the next call earlier
        with raising(ac.PeerRefusedError, "refused its side"):
            await me.get(ac.all_gather(_full(1, 2)))
        second = ac.all_reduce(_full(me.rank + 2, 5), lane="other")
    total = float(sum(range(1, n + 1)))
    oracle.same(await me.get(gathered), torch.cat([_full(rank, 2) for rank in range(n)]))
    oracle.same(await me.get(first), _full(total, 3))
    oracle.same(await me.get(second), _full(total + n, 5))
    assert await me.get(ac.all_reduce(1)) == n


def test_other_lanes_travel_together_whenever_a_refusal_is_heard_of(several: World) -> None:
    """A call on a lost lane used to send them early, and only on ranks that did not know of the loss."""
    several.run(other_lanes)


async def messages_between(me: Rank) -> None:
    n = me.size
    with ac.coalescing():
        first = ac.all_reduce(_full(me.rank, 3))
        if me.lacks("send"):
            with raising(ac.UnsupportedOpError):
                ac.send(_full(7, 2), dst=(me.rank + 1) % n)
        elif me.rank == 0:
            message = ac.send(_full(7, 2), dst=1)
        elif me.rank == 1:
            message = ac.recv(_full(0, 2), src=0)
        second = ac.all_reduce(_full(me.rank, 5))
    if me.rank < 2 and not me.lacks("send"):
        got = await me.get(message)
        assert me.rank == 0 or torch.equal(got, _full(7, 2))
    total = float(sum(range(n)))
    oracle.same(await me.get(first), _full(total, 3))
    oracle.same(await me.get(second), _full(total, 5))


def test_messages_between_two_ranks_change_nothing_of_what_travels_together(several: World) -> None:
    """The two ranks used to send the deferred calls for a message, while a third rank did not."""
    several.run(messages_between)


async def filled_beside(me: Rank) -> None:
    n = me.size
    total = float(sum(range(1, n + 1)))
    like = _full(0, n)
    x = _full(me.rank + 1, n)
    operation = ac.prepare("all_reduce", like, out=x, lane="b")
    for fills in (
        lambda: ac.all_gather(_full(50, 1), out=x, lane="b"),
        lambda: ac.all_reduce([like, like.int()], out=[x, like.int()], lane="b"),
        operation.start,
        *([] if me.lacks("recv") else [lambda: ac.recv(x, src=(me.rank - 1) % n, out=x)]),
    ):
        with ac.coalescing():
            work, here = ac.all_reduce(x, lane="c"), _here()
            with raising(ac.InvalidArgumentError, f"{here} reads, which has not been waited for"):
                fills()
        oracle.same(await me.get(work), _full(total, n))
    with ac.coalescing():  # on its own lane, a refused call takes the block along
        work = ac.all_reduce(x)
        with raising(ac.InvalidArgumentError, "reads, which has not been waited for"):
            ac.all_gather(_full(50, 1), out=x)
    with raising(ac.PeerRefusedError):
        await me.get(work)


def test_what_waits_to_be_sent_is_not_overwritten_by_a_call_that_does_not(several: World) -> None:
    """The other call may be on another lane, between two ranks, or sent already."""
    several.run(filled_beside)


async def read_too_early(me: Rank) -> None:
    x = _full(me.rank + 1, 3)
    with ac.coalescing():
        work, here = ac.all_reduce(x, out=x), _here()
        assert here in repr(work)
        mapped = work.map(torch.clone)
        assert here in repr(mapped)
        with raising(ac.InvalidArgumentError, f"the call at {here} in a coalescing block fills (out=)"):
            ac.all_reduce(x, lane="other")
    oracle.same(await me.get(mapped), _full(sum(range(1, me.size + 1)), 3))


def test_a_call_that_reads_what_a_deferred_one_fills_shows_where_that_one_was_made(several: World) -> None:
    several.run(read_too_early)


async def one_dropped(me: Rank) -> None:
    total = float(sum(range(1, me.size + 1)))
    first, second = _full(me.rank + 1, 3), _full(me.rank + 2, 3)
    with ac.coalescing():
        dropped, work = ac.all_reduce(first, out=first), ac.all_reduce(second, out=second)
    with pytest.warns(ac.UnawaitedWorkWarning):
        del dropped
    await me.get(ac.barrier())
    with raising(ac.InvalidArgumentError, "not been waited for yet; await it first"):
        ac.all_reduce(first)
    oracle.same(await me.get(work), _full(total + me.size, 3))
    oracle.same(first, _full(total, 3))
    oracle.same(await me.get(ac.all_reduce(first)), _full(total * me.size, 3))


def test_whoever_waits_for_one_call_of_a_block_fills_what_others_of_it_were_given(several: World) -> None:
    """That includes a dropped work's: until then its memory must not be used."""
    several.run(one_dropped)


async def awaited_elsewhere(me: Rank, *, in_a_thread: bool) -> None:
    if me.rank == 1:
        me.see("go")
    with ac.coalescing():
        work = ac.all_reduce(_full(me.rank, 2))
        future = work.as_concurrent_future() if in_a_thread else work.as_future()
        await asyncio.sleep(0)
        later = ac.all_reduce(_full(me.rank + 1, 2))
    me.show("go")
    oracle.same(await later, _full(3, 2))
    oracle.same(await (asyncio.wrap_future(future) if in_a_thread else future), _full(1, 2))


@pytest.mark.parametrize("in_a_thread", [True, False])
def test_a_future_of_a_call_that_was_put_off_leaves_the_lane_to_the_block(
    pair: World, in_a_thread: bool
) -> None:
    """The thread or task waiting for it used to send the block's calls, and owned the lane from then on."""
    pair.run(awaited_elsewhere, in_a_thread=in_a_thread)


def test_ctrl_c_while_a_block_is_sent_fails_its_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to be neither sent nor failed, and gave None."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(coalescing.autograd, "fused", struck)
        with pytest.raises(KeyboardInterrupt), ac.coalescing():
            works = [ac.all_reduce(_full(1, 2)), ac.all_reduce(_full(1, 2), op="max")]
    for work in works:
        with pytest.raises(ac.CollectiveError, match=r"not sent.*KeyboardInterrupt"):
            work.wait()


def test_a_thread_that_waits_while_a_block_is_sent_gets_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread used to find nothing to send, and took None for the result."""
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(work.wait()))
    fused = coalescing.autograd.fused

    def sending(*args: Any) -> Any:
        thread.start()
        thread.join(0.1)
        return fused(*args)

    monkeypatch.setattr(coalescing.autograd, "fused", sending)
    with ac.coalescing():
        work = ac.all_reduce(_full(1, 2))
    thread.join(patient(30))
    assert [float(total[0]) for total in got] == [1.0]


def test_what_is_no_function_is_refused_where_it_is_given() -> None:
    """Outside of blocks it was; in one, the calls after it failed on this rank when all were sent."""
    with ac.coalescing():
        first = ac.all_reduce(torch.ones(2))
        for wrong in (None, "later"):
            with raising(ac.InvalidArgumentError, "add_done_callback"):
                first.add_done_callback(wrong)  # type: ignore[arg-type]
            with raising(ac.InvalidArgumentError, "map"):
                first.map(wrong)  # type: ignore[arg-type,var-annotated]
        second = ac.all_reduce(torch.ones(2))
    assert [first.wait().tolist(), second.wait().tolist()] == [[1.0, 1.0]] * 2


def test_a_wait_in_another_thread_ends_with_the_error_of_a_block_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes as the call is being given up; it returned None."""
    got: list[object] = []
    fail = ac.Work._fail

    def waited_for(work: ac.Work[object], error: BaseException) -> None:
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)  # it waits for the block's lock, or is over
        fail(work, error)
        threads.append(waiting)

    def wait() -> None:
        try:
            got.append(work.wait())
        except BaseException as error:
            got.append(type(error).__name__)

    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError), ac.coalescing():
        work = ac.all_reduce(torch.ones(2))
        monkeypatch.setattr(ac.Work, "_fail", waited_for)
        raise RuntimeError("the block ends early")
    for thread in threads:
        thread.join(patient(10))
    assert got == ["CollectiveError"]

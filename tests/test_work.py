"""The `Work` handle: it starts at the call, may be awaited anywhere and repeatedly, and reports its state."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import gc
import inspect
import logging
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
import trio

import asynccoll as ac
import oracle
from asynccoll import flight
from asynccoll.host.call_number import ROUND, numbered
from asynccoll.host.call_site import Place
from asynccoll.runtime.process import current
from asynccoll.waiting import arriving
from asynccoll.waiting.forgotten import NotItsResult, warn
from asynccoll.waiting.work import Work
from asynccoll.waiting.work import _claim as claim
from patience import patient
from ranks import Rank, raising
from worlds import World


def pending(me: Rank) -> Any:
    """A work of two ranks that does not complete before rank 1 has seen the sign "go"."""
    if me.rank == 1:
        me.see("go")
    return ac.all_reduce(torch.ones(1))


TWO = torch.full((1,), 2.0)


# ---------------------------------------------------------------- eager


async def eager(me: Rank) -> None:
    work = ac.all_reduce(torch.ones(1))
    if me.rank == 0:
        me.see("rank 1 has its result")  # and has not awaited anything so far
    else:
        oracle.same(await me.get(work), TWO)
        me.show("rank 1 has its result")
    oracle.same(await me.get(work), TWO)


def test_starts_at_the_call(pair: World, runner: str) -> None:
    """The other rank gets its result before this one awaits its own."""
    pair.run(eager, runner=runner)


# ---------------------------------------------------------------- a forgotten await


async def used_as_its_result(me: Rank) -> None:
    work = ac.all_reduce(torch.ones(2))
    one = torch.ones(2)
    for name, mistake in {
        "`+`": lambda: work + 1,
        "`-`": lambda: 1 - work,
        "`*`": lambda: one * work,
        "`<`": lambda: work < 1,
        "`[]`": lambda: work[0],
        "`float()`": lambda: float(work),
        "relu": lambda: torch.relu(work),
        "cat": lambda: torch.cat([one, work]),
        "add_": lambda: one.add_(work),
        "'.3f'": lambda: f"{work:.3f}",
    }.items():
        with (
            me.case(name),
            raising(ac.PayloadTypeError, name, "all_reduce", "test_work.py:", "await work", "wait()"),
        ):
            mistake()
    with me.case("attribute"), raising(AttributeError, "'shape'", "all_reduce", "await work"):
        _ = work.shape
    with me.case("sent on"), raising(ac.PayloadTypeError, "Work", "await"):
        ac.all_reduce(work)
    with me.case("protocols"):
        assert not hasattr(work, "__array__")
        assert work == work  # noqa: PLR0124  # compared by identity, as ever
        assert len({work, work}) == 1
        await me.get(work)  # its state is part of the text
        assert f"{work}" == str(work)
    oracle.same(await me.get(work), torch.full((2,), 2.0))


def test_a_forgotten_await_is_told(pair: World) -> None:
    """Whatever uses a work in place of its result, the error names the call and the await."""
    pair.run(used_as_its_result)


# ---------------------------------------------------------------- awaiting


async def again(me: Rank) -> None:
    work = ac.all_reduce(torch.ones(3))
    first = await me.get(work)
    assert await me.get(work) is first
    assert work.wait() is first
    assert work.result() is first
    assert work.done()
    assert work.exception() is None


def test_gives_the_same_object_again_and_again(pair: World, runner: str) -> None:
    """Awaiting, waiting and asking later all return the same object."""
    pair.run(again, runner=runner)


async def many_tasks(me: Rank) -> None:
    work = pending(me)
    results: list[Any] = []

    async def one() -> None:
        results.append(await work)

    async def release() -> None:
        me.show("go")

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(one)
        tasks.start_soon(release)
    assert len(results) == 10
    assert all(result is results[0] for result in results)
    oracle.same(results[0], TWO)


async def let_go(me: Rank) -> None:
    if me.rank == 0:
        await many_tasks(me)
    else:
        oracle.same(await pending(me), TWO)


def test_several_tasks_await_one_work(pair: World, loop: str) -> None:
    """Ten concurrent tasks all get the same result."""
    pair.run(let_go, runner=loop)


def other_loops(me: Rank) -> None:
    async def start() -> Any:
        return pending(me)

    async def finish(work: Any) -> Any:
        if me.rank == 0:
            me.show("go")
        return await work

    for first, second in ((asyncio.run, trio.run), (trio.run, asyncio.run)):
        run_in(first, partial(barrier))
        work = run_in(first, start)
        oracle.same(run_in(second, partial(finish, work)), TWO)
        oracle.same(run_in(first, partial(finish, work)), TWO)
        oracle.same(work.wait(), TWO)


async def barrier() -> None:
    await ac.barrier()


def run_in(run: Any, function: Any) -> Any:
    """Run `function()` on a new event loop."""
    return run(function()) if run is asyncio.run else run(function)


def test_is_awaited_on_another_loop(pair: World) -> None:
    """A work started on one loop is awaited on another, even of the other kind."""
    pair.run(other_loops)


def from_threads(me: Rank) -> None:
    work = pending(me)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work.wait) for _ in range(4)]
        me.show("go")
        assert all(one.result() is results[0].result() for one in results)
    oracle.same(results[0].result(), TWO)


def test_is_waited_for_from_several_threads(pair: World) -> None:
    """Four waiting threads all get the same result."""
    pair.run(from_threads)


async def in_loop(me: Rank) -> None:
    oracle.same(ac.all_reduce(torch.ones(1)).wait(), TWO)


def test_wait_blocks_inside_a_running_loop(pair: World, loop: str) -> None:
    """wait() is allowed while an event loop runs, and blocks it."""
    pair.run(in_loop, runner=loop)


# ---------------------------------------------------------------- looking


async def looks(me: Rank) -> None:
    if me.rank == 1:
        oracle.same(await me.get(pending(me)), TWO)
        return
    work = pending(me)
    assert not work.done()
    for ask in (work.result, work.exception):
        with raising(ac.WorkNotDoneError, "all_reduce"):
            ask()
    with raising(ac.PayloadTypeError, "done()") as caught:
        bool(work)
    assert isinstance(caught.error, TypeError)
    assert "all_reduce" in repr(work)
    me.show("go")
    oracle.same(await me.get(work), TWO)
    assert work.done()
    oracle.same(work.result(), TWO)


def test_says_whether_it_is_done(pair: World, runner: str) -> None:
    """Until it is done, done() is False and result() raises; a work has no truth value."""
    pair.run(looks, runner=runner)


async def becomes_done(me: Rank) -> None:
    if me.rank == 0:
        me.show("go")
    work = pending(me)
    me.look_until_done(work, "done() never becomes true")
    oracle.same(work.result(), TWO)


def test_becomes_done_without_being_awaited(pair: World, runner: str) -> None:
    """done() becomes true without a waiter."""
    pair.run(becomes_done, runner=runner)


def looked_at(me: Rank, how: str) -> str:
    """Return the recorded state of a call without a waiter, after its outcome has been read."""
    x = torch.ones(1)
    work = ac.all_reduce(x, out=x) if how == "detached" else ac.all_reduce(x)
    if how == "detached":
        work.detach()
    me.look_until_done(work, "nobody waits for it, and it is not over")
    oracle.same(work.result(), TWO)
    recorded = flight.read(current().recorder.buffer)
    assert recorded is not None
    return recorded.calls[-1].state


@pytest.mark.parametrize("how", ["detached", "result"])
def test_what_nobody_waits_for_is_recorded_as_finished(pair: World, how: str) -> None:
    assert pair.run(looked_at, how, runner="blocking") == ["finished", "finished"]


# ---------------------------------------------------------------- deriving


async def mapped(me: Rank) -> None:
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * 2

    work = ac.all_reduce(torch.ones(1)).map(double).map(torch.Tensor.item)
    assert await me.get(work) == 4.0
    assert await me.get(work) == 4.0
    assert len(calls) == 1, "applied more than once"

    def fail(_: object) -> None:
        raise LookupError("mine")

    broken = ac.all_reduce(1).map(fail)
    for _ in range(2):
        with raising(LookupError, "mine"):
            await me.get(broken)
    assert isinstance(broken.exception(), LookupError)
    assert await me.get(ac.all_reduce(1)) == 2


def test_map_applies_a_function_once(pair: World, runner: str) -> None:
    """The function of map() runs once; its error is raised by the derived work."""
    pair.run(mapped, runner=runner)


async def called_back(me: Rank) -> None:
    heard: list[Any] = []
    told = threading.Event()

    def callback(work: Any) -> None:
        heard.append((work, work.done()))
        told.set()

    work = pending(me)
    work.add_done_callback(callback)
    assert not heard or me.rank == 1
    me.show("go")
    oracle.same(await me.get(work), TWO)
    assert told.wait(patient(10)), "the callback is never called"
    assert heard == [(work, True)]
    late: list[Any] = []
    work.add_done_callback(late.append)
    assert late == [work], "not called at once on a work that is done"


def test_done_callbacks(pair: World, runner: str) -> None:
    """A callback is called once, with the work, when it completes; immediately if it has completed."""
    pair.run(called_back, runner=runner)


def test_a_work_may_be_completed_by_a_thread_that_claims_another() -> None:
    """Garbage collection, which may run where a thread claims a work, can complete others."""
    heard: list[Any] = []
    operation: Any = SimpleNamespace(attended=lambda one_done: one_done())
    work: Work[None] = Work((operation,), None)
    work._told()

    def complete() -> None:
        with claim:
            work.add_done_callback(heard.append)

    thread = threading.Thread(target=complete, daemon=True)
    thread.start()
    thread.join(patient(5))
    assert heard == [work]


async def bad_callback(me: Rank) -> None:
    told, logged = threading.Event(), _Kept()
    log = logging.getLogger("asynccoll.work")
    log.addHandler(logged)
    log.propagate = False
    try:
        work = pending(me)
        work.add_done_callback(_raising)
        work.add_done_callback(lambda _: told.set())
        me.show("go")
        assert told.wait(patient(10)), "the callback behind one that raised is never called"
        oracle.same(await me.get(work), TWO)
        work.add_done_callback(_raising)
        # Where ranks are threads, the other rank's works are logged here too.
        mine = [record for record in logged.records if record.args[1] is work]
        assert [str(record.exc_info[1]) for record in mine] == ["of the callback"] * 2
    finally:
        log.removeHandler(logged)
        log.propagate = True
    after = ac.all_reduce(me.rank)
    told.clear()
    after.add_done_callback(lambda _: told.set())
    assert told.wait(patient(10)), "the completing thread has ended"
    assert await me.get(after) == 1


def _raising(_: Any) -> None:
    raise LookupError("of the callback")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: Any) -> None:
        self.records.append(record)


def test_a_callback_that_raises_is_logged_and_harms_nobody(pair: World) -> None:
    """The other callbacks are called, and the thread that completes works survives."""
    pair.run(bad_callback)


def refused_reduction(me: Rank) -> Any:
    """Return rank 0's work of a call that rank 1 refuses, and None on rank 1."""
    x = torch.ones(2, dtype=torch.int32)
    if me.rank == 0:
        return ac.all_reduce(x)
    with raising(ac.PayloadTypeError):
        ac.all_reduce(x, op="avg")
    return None


def hears_of_a_refusal(me: Rank) -> None:
    work = refused_reduction(me)
    if work is not None:
        future = work.as_concurrent_future()
        with raising(ac.PeerRefusedError, "avg"):
            future.result(10)
    assert ac.all_reduce(1).wait() == 2


def future_of_what_never_ends(me: Rank) -> None:
    if me.rank == 0:
        work = ac.all_reduce(torch.ones(2), lane="late", timeout=0.2)
        with raising(ac.CollectiveTimeoutError, "has not called all_reduce #1 on lane 'late'"):
            work.as_concurrent_future().result(30)
        assert not work.done()
        me.show("given up")
        me.see("over")
        assert work.as_concurrent_future().result(30).tolist() == [2.0, 2.0]
    else:
        me.see("given up")
        assert ac.all_reduce(torch.ones(2), lane="late").wait().tolist() == [2.0, 2.0]
        me.show("over")


def test_a_concurrent_future_has_the_deadline_of_a_wait(pair: World) -> None:
    pair.run(future_of_what_never_ends)


def test_callbacks_hear_of_a_refusal(pair: World) -> None:
    """A program that left a callback learns without waiting that a peer has refused its side."""
    pair.run(hears_of_a_refusal)


async def as_future(me: Rank) -> None:
    work = pending(me)
    if me.rank == 0:
        future = work.as_future()
        assert isinstance(future, asyncio.Future)
        with raising(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.05)
        me.show("go")
    done, waiting = await asyncio.wait([work.as_future(), work.as_future()])
    assert not waiting
    for one in done:
        oracle.same(one.result(), TWO)
    (gathered,) = await asyncio.gather(ac.all_reduce(torch.ones(1)).as_future())
    oracle.same(gathered, TWO)


def test_as_future_for_asyncio(pair: World) -> None:
    """asyncio's wait_for, wait and gather take as_future(); cancelling the future leaves the work."""
    pair.run(as_future)


def test_a_work_that_is_superseded_while_it_is_finished_fails() -> None:
    """Another thread starts the prepared call again: the memory being read is now the next call's."""
    work: Work[object] = Work((), lambda: work.supersede("started again"))
    for _ in range(2):
        with pytest.raises(ac.CollectiveError, match="started again"):
            work.wait()


# ---------------------------------------------------------------- many


async def all_of_them(me: Rank) -> None:
    works = [ac.all_reduce(k) for k in range(20)]
    assert await ac.wait_all(works) == tuple(2 * k for k in range(20))
    assert await ac.wait_all([]) == ()

    def fail(_: object) -> None:
        raise LookupError("third")

    works = [ac.all_reduce(k) for k in range(5)]
    works[2] = works[2].map(fail)
    with raising(LookupError, "third"):
        await ac.wait_all(works)
    assert all(work.done() for work in works), "did not wait for all"


def test_wait_all(pair: World, loop: str) -> None:
    """All results are returned in order; an error is raised only after all are done."""
    pair.run(all_of_them, runner=loop)


def future_without_a_loop(_: Rank) -> None:
    work = ac.all_reduce(torch.ones(1))
    with raising(ac.InvalidArgumentError, "there is none", "as_concurrent_future"):
        work.as_future()
    oracle.same(work.wait(), TWO)


def test_as_future_without_a_loop_is_refused(pair: World) -> None:
    pair.run(future_without_a_loop, runner="blocking")


async def _arrived(works: Any) -> None:
    async for _ in ac.as_completed(works):
        pass


async def started_again(me: Rank, how: str) -> None:
    wait: Callable[[Any], Any] = _arrived if how == "as_completed" else ac.wait_all
    first, second = (ac.prepare("all_reduce", torch.ones(1), lane=lane) for lane in ("one", "two"))
    if me.rank == 0:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await wait([first.start(), second.start()])
        assert scope.cancelled_caught
        me.show("go")
    else:
        me.see("go")
        await ac.wait_all([first.start(), second.start()])
    for result in await ac.wait_all([first.start(), second.start()]):
        oracle.same(result, TWO)


@pytest.mark.parametrize("how", ["wait_all", "as_completed"])
def test_a_wait_for_several_that_was_cancelled_is_cut_short_for_each(
    pair: World, loop: str, how: str
) -> None:
    """Prepared calls can be started again, even the second, which the wait had not reached."""
    pair.run(started_again, how, runner=loop)


async def sent_crosswise(me: Rank) -> None:
    with ac.coalescing():
        works = [ac.all_reduce(torch.ones(1), lane=lane, timeout=patient(5)) for lane in ("one", "two")]
        for result in await ac.wait_all(works if me.rank else works[::-1]):
            oracle.same(result, TWO)


def test_wait_all_sends_all_first(pair: World, loop: str) -> None:
    """Ranks that list works of two lanes in different orders do not deadlock."""
    pair.run(sent_crosswise, runner=loop)


def all_of_them_without_a_loop(me: Rank) -> None:
    work = pending(me)
    both = ac.wait_all((work, ac.all_reduce(1, lane="quick")))
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError):
            both.wait(0.05)
        with raising(ac.PayloadTypeError, "was an await forgotten"):
            both[0]  # type: ignore[index]  # as who has forgotten it would
        me.show("go")
    first, second = both.wait(patient(10))
    oracle.same(first, TWO)
    assert second == 2
    assert ac.wait_all([]).wait() == ()
    with raising(ac.InvalidCallError, "timeout"):
        ac.wait_all([]).wait("soon")  # type: ignore[arg-type]  # as who has not read this would


def test_wait_all_without_a_loop(pair: World) -> None:
    """The timeout covers all of them together, and a second wait continues."""
    pair.run(all_of_them_without_a_loop, runner="blocking")


async def fastest_first(me: Rank) -> None:
    slow = pending(me) if me.rank == 0 else None
    quick = [ac.all_reduce(k, lane="quick") for k in range(5)]
    seen = []
    if me.rank == 1:
        await ac.wait_all(quick)
        oracle.same(await pending(me), TWO)
        return
    async for work in ac.as_completed([slow, *quick]):
        seen.append(work)
        if len(seen) == 5:
            assert all(one is not slow for one in seen), "the one held up came early"
            me.show("go")
    assert seen[-1] is slow
    assert {id(one) for one in seen} == {id(slow), *map(id, quick)}
    assert sorted(one.result() for one in seen[:-1]) == [0, 2, 4, 6, 8]


def test_as_completed_gives_the_fastest_first(pair: World, loop: str) -> None:
    """Each work comes once, the delayed one last."""
    pair.run(fastest_first, runner=loop)


async def broken_off(me: Rank) -> None:
    slow = pending(me)
    if me.rank == 0:
        (operation,) = slow.operations
        future: concurrent.futures.Future[int] = concurrent.futures.Future()

        async def settle() -> None:
            while not current().watch._watched.get(operation):
                await anyio.sleep(0)
            future.set_result(3)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(settle)
            async with contextlib.aclosing(ac.as_completed([slow, ac.adopt(future)])) as arriving:
                async for work in arriving:
                    assert work.result() == 3
                    break
        assert operation not in current().watch._watched
        me.show("go")
    oracle.same(await slow, TWO)


def test_a_loop_that_was_broken_off_waits_no_longer(pair: World, loop: str) -> None:
    """It counted as waiting for the works that were left: in others' errors and in `asynccoll where`."""
    pair.run(broken_off, runner=loop)


async def many_completed(me: Rank) -> None:
    for listed in (iter, reversed):
        await _completed_of_lanes(listed)


async def _completed_of_lanes(listed: Callable[[Any], Any]) -> None:
    lanes = ("one", "two", "three")
    works = {ac.all_reduce(k, lane=lanes[k % 3]): k for k in range(60)}
    seen = [work async for work in ac.as_completed(listed(works))]
    assert len(seen) == 60
    assert set(seen) == set(works), "each comes once"
    assert all(work.result() == 2 * k for work, k in works.items())
    for at in range(3):
        of_lane = [works[work] for work in seen if works[work] % 3 == at]
        assert of_lane == list(range(at, 60, 3)), "a lane's works come in its order"


def test_as_completed_of_many_lanes(pair: World, loop: str) -> None:
    """Each work comes once, those of a lane in lane order, however they are listed."""
    pair.run(many_completed, runner=loop)


async def completed_or_not(me: Rank) -> None:
    refused = refused_reduction(me)
    if refused is not None:
        async for work in ac.as_completed([refused]):
            with raising(ac.PeerRefusedError, "avg"):
                work.result()
    if me.rank == 1:
        me.see("go")
    slow = ac.all_reduce(torch.ones(1), timeout=1.0 if me.rank == 0 else None)
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError):
            async for _ in ac.as_completed([slow]):
                pass
        me.show("go")
    oracle.same(await slow, TWO)


def test_as_completed_waits_for_nobody_in_vain(pair: World, loop: str) -> None:
    """A peer's refusal ends a work; its own timeout ends the wait."""
    pair.run(completed_or_not, runner=loop)


async def scoped(me: Rank) -> None:
    with ac.scope():
        works = [ac.all_reduce(k) for k in range(10)]
    assert all(work.done() for work in works), "left with work outstanding"
    async with ac.scope():
        more = [ac.all_reduce(k) for k in range(10)]
    assert all(work.done() for work in more), "left with work outstanding"
    assert [work.result() for work in works + more] == [2 * k for k in range(10)] * 2
    with raising(LookupError, "mine"):
        async with ac.scope():
            last = ac.all_reduce(1)
            raise LookupError("mine")
    assert last.done(), "left with work outstanding on an error"


def test_a_scope_waits_for_what_is_outstanding(pair: World, loop: str) -> None:
    """A scope is not left, at its end or by an error, before its works are done."""
    pair.run(scoped, runner=loop)


async def scoped_long(me: Rank) -> None:
    async with ac.scope():
        if (refused := refused_reduction(me)) is not None:
            with raising(ac.PeerRefusedError):
                await refused.map(id)
        results = []
        for _ in range(300):
            results.append(weakref.ref(await ac.all_reduce(torch.ones(1))))
        kept = sum(result() is not None for result in results)
    assert kept < 200, f"{kept} of 300 results are held until the end of the scope"
    if (refused := refused_reduction(me)) is not None:
        with raising(ac.PeerRefusedError):
            async with ac.scope():
                refused.map(id)  # which is never awaited


def test_a_scope_lets_go_of_what_was_awaited(pair: World, loop: str) -> None:
    """It lets go of results, and of errors that were caught inside."""
    pair.run(scoped_long, runner=loop)


def scoped_blocking(me: Rank) -> None:
    with ac.scope():
        work = pending(me)
        me.show("go")
    assert work.done()


def test_a_scope_without_a_loop(pair: World) -> None:
    """`with ac.scope()` blocks if there is no event loop."""
    pair.run(scoped_blocking)


class Memory(bytearray):
    """The memory of a tensor, of which weak references tell whether it is still alive."""


async def lets_go_of_memory(me: Rank) -> None:
    if me.backend != "gloo":  # elsewhere a library or a device may hold it, so that nothing is measured
        return
    for call in (ac.all_reduce, ac.broadcast, lambda x, out: ac.all_reduce({"x": x}, out={"x": out})):
        memory = Memory(4000)
        there = weakref.ref(memory)
        x = torch.frombuffer(memory, dtype=torch.float32)
        await me.get(call(x, out=x))
        del memory, x
        deadline = time.monotonic() + patient(5)
        while (
            there() is not None and time.monotonic() < deadline
        ):  # gloo's thread may hold it a moment longer
            gc.collect()
            time.sleep(0.001)
        assert there() is None, "the memory is held after the result was let go"


def test_the_memory_of_what_is_over_is_let_go(pair: World, runner: str) -> None:
    """It is released without waiting for the lane's next operation."""
    pair.run(lets_go_of_memory, runner=runner)


# ---------------------------------------------------------------- lost handles


def heard_by(function: Any) -> list[warnings.WarningMessage]:
    """Return the warnings about lost handles while `function()` runs."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        function()
    return [one for one in heard if issubclass(one.category, ac.UnawaitedWorkWarning)]


def test_an_attribute_of_its_own_that_is_not_set_yet_is_no_result() -> None:
    """A failed constructor leaves it unset; an endless recursion in the error would hide the reason."""

    class Half(NotItsResult):
        __slots__ = ("state",)

        def __repr__(self) -> str:
            return f"<Half {self.state}>"

    with pytest.raises(AttributeError, match=r"^state$"):
        repr(Half())


def misused() -> None:
    """Use a work as its result; the error already says that it was not awaited."""
    with contextlib.suppress(ac.PayloadTypeError):
        float(ac.all_reduce(torch.ones(1)))
    with contextlib.suppress(AttributeError):
        _ = ac.all_reduce(torch.ones(1)).shape


def lost(me: Rank) -> None:
    line = 0

    def drop() -> None:
        nonlocal line
        line = inspect.currentframe().f_lineno + 1
        ac.all_reduce(torch.ones(1))

    heard = heard_by(drop)
    assert len(heard) == 1, f"warned {len(heard)} times"
    text = str(heard[0].message)
    assert Path(__file__).name in text, text
    assert f":{line}" in text, f"{line} not in {text}"
    assert "all_reduce" in text
    assert heard[0].lineno == line
    assert issubclass(ac.UnawaitedWorkWarning, ResourceWarning | RuntimeWarning)
    assert not heard_by(lambda: ac.all_reduce(torch.ones(1)).detach())
    assert not heard_by(lambda: ac.all_reduce(torch.ones(1)).wait())
    assert not heard_by(lambda: [ac.all_reduce(torch.ones(1)).map(len).detach()])
    assert not heard_by(misused)
    assert ac.all_reduce(1).wait() == 2


@pytest.mark.processes  # warning filters belong to the process
def test_a_dropped_handle_warns_once(pair: World) -> None:
    """The warning names the operation, the file and the line; waiting or detach() prevents it."""
    pair.run(lost)


# ---------------------------------------------------------------- time and cancellation


async def late(me: Rank) -> None:
    if me.rank == 1:
        oracle.same(await me.get(pending(me)), TWO)
        return
    work = ac.all_reduce(torch.ones(1), timeout=0.05)
    with raising(ac.CollectiveTimeoutError, "all_reduce") as caught:
        await me.get(work)
    assert isinstance(caught.error, TimeoutError)
    told = time.monotonic()
    with raising(ac.CollectiveTimeoutError, "all_reduce"):
        await me.get(work)
    assert time.monotonic() - told > 0.04, "waiting on is not waiting again"
    me.show("go")
    me.look_until_done(work, "never done after its timeout")
    oracle.same(await me.get(work), TWO)


async def then_go_on(me: Rank) -> None:
    await late(me)
    assert await me.get(ac.all_reduce(1)) == 2


def test_timeout_raises_and_leaves_the_operation(pair: World, runner: str) -> None:
    """timeout= ends the wait; the operation completes later, with its result and in its order."""
    pair.run(then_go_on, runner=runner)


async def wait_timeout(me: Rank) -> None:
    work = pending(me)
    if me.rank == 0:
        for _ in range(3):
            with raising(ac.CollectiveTimeoutError):
                work.wait(timeout=0.02)
        me.show("go")
    oracle.same(work.wait(timeout=patient(10)), TWO)


def test_wait_takes_a_timeout_of_its_own(pair: World, runner: str) -> None:
    """wait(timeout) may time out several times before the result is there."""
    pair.run(wait_timeout, runner=runner)


async def late_together(me: Rank) -> None:
    """Nine calls are late on rank 0, which asks the other rank once for each way to wait for several."""
    context, asked = current(), []

    def blame(operation: Any) -> Any:
        asked.append(operation)
        return type(context).blame(context, operation)

    def called() -> list[Any]:
        works = [ac.all_reduce(1.0) for _ in range(3)]
        for (operation,) in (work.operations for work in works if me.rank == 0):
            operation.deadline = 0.0  # in the past
        every.extend(works)
        return works

    every: list[Any] = []
    if me.rank == 1:
        me.see("asked")
    together = ac.wait_all(called())
    if me.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context, "blame", blame)
            with raising(ac.CollectiveTimeoutError):
                together.wait(timeout=0.0)
            assert len(asked) == 1
            with raising(ac.CollectiveTimeoutError), ac.scope():
                called()
            assert len(asked) == 2
            with raising(ac.CollectiveTimeoutError):
                async with ac.scope():
                    called()
            assert len(asked) == 3
            with raising(ac.CollectiveTimeoutError):
                for (operation,) in (work.operations for work in every):
                    operation.deadline = 0.0
                await ac.wait_all(every)
            assert len(asked) == 4
        me.show("asked")
    else:
        called(), called()
    assert await ac.wait_all(every) == (2.0,) * 9


def test_several_that_are_late_ask_others_once(pair: World, loop: str) -> None:
    """A question to a silent rank takes a second: with many works, a wait lasted for minutes."""
    pair.run(late_together, runner=loop)


def test_wait_bounds_all_operations_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that the first one takes is not available to the second."""
    given: list[float] = []

    def slow(_: Any, seconds: float) -> None:
        given.append(seconds)
        time.sleep(0.01)
        if len(given) == 2:
            raise ac.CollectiveTimeoutError("late")

    monkeypatch.setattr("asynccoll.waiting.work.block", slow)
    two: Any = (SimpleNamespace(over=True), SimpleNamespace(over=True))
    with pytest.raises(ac.CollectiveTimeoutError):
        ac.Work(two, None).wait(timeout=5.0)
    assert given[0] <= 5.0
    assert given[1] <= given[0] - 0.01


async def cancelled(me: Rank) -> None:
    work = pending(me)
    if me.rank == 0:
        with anyio.move_on_after(0.05) as scope:
            await work
        assert scope.cancelled_caught, "done before the other rank came"
        with raising(TimeoutError), anyio.fail_after(0.05):
            await work
        assert not work.done()
        behind = ac.all_reduce(torch.ones(2))
        me.show("go")
        oracle.same(await behind, torch.full((2,), 2.0))
    else:
        oracle.same(await work, TWO)
        oracle.same(await ac.all_reduce(torch.ones(2)), torch.full((2,), 2.0))
    oracle.same(await work, TWO)
    assert await ac.all_reduce(1) == 2


def test_cancelling_an_awaiter_leaves_the_operation(pair: World, loop: str) -> None:
    """anyio's deadlines end the wait; the lane keeps its order and the work its result."""
    pair.run(cancelled, runner=loop)


async def task_cancelled(me: Rank) -> None:
    work = pending(me)
    if me.rank == 0:

        async def waiter() -> Any:
            return await work

        doomed, patient = asyncio.create_task(waiter()), asyncio.create_task(waiter())
        await asyncio.sleep(0)
        doomed.cancel()
        await asyncio.wait([doomed])
        assert doomed.cancelled()
        assert not patient.done()
        me.show("go")
        oracle.same(await patient, TWO)
    oracle.same(await work, TWO)


def test_cancelling_one_of_two_awaiters(pair: World) -> None:
    """The other one still gets the result."""
    pair.run(task_cancelled)


# ---------------------------------------------------------------- not a value


async def not_copied(me: Rank) -> None:
    work = ac.all_reduce(1)
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with raising(ac.PayloadTypeError):
            copier(work)
    assert await me.get(work) == 2


def test_refuses_to_be_pickled_or_copied(pair: World) -> None:
    """A work belongs to its process."""
    pair.run(not_copied)


# ---------------------------------------------------------------- cost


def os_threads() -> int:
    """The number of threads of this process, native ones included."""
    return len(list(Path("/proc/self/task").iterdir()))


async def no_threads(me: Rank) -> None:
    for _ in range(20):
        await me.get(ac.all_reduce(torch.ones(1)))
    before = os_threads(), threading.active_count()
    works = []
    for turn in range(500):
        works.append(ac.all_reduce(torch.ones(1)))
        if turn % 50 == 0:
            assert os_threads() <= before[0] + 1, "threads grow with operations in flight"
    for work in works:
        await me.get(work)
    after = os_threads(), threading.active_count()
    assert after[0] <= before[0] + 1, f"{before} -> {after}"
    assert after[1] <= before[1] + 1, f"{before} -> {after}"


def test_no_thread_per_operation(pair: World, runner: str) -> None:
    """Five hundred operations in flight use as many threads as one."""
    pair.run(no_threads, runner=runner)


async def turns_while(work: Any, enough: Any) -> int:
    """Return how many turns another task gets while this one awaits `work`."""
    turns, over = 0, False

    async def heartbeat() -> None:
        nonlocal turns
        while not over:
            turns += 1
            enough(turns)
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat)
        await work
        over = True
    return turns


async def keeps_turning(me: Rank) -> None:
    if me.rank == 1:
        oracle.same(await pending(me), TWO)
    else:
        turns = await turns_while(pending(me), lambda turns: me.show("go") if turns == 50 else None)
        assert turns >= 50
    x = torch.ones(16 * 2**20)
    turns = await turns_while(ac.all_reduce(x, out=x), lambda turns: None)
    assert turns >= 5, f"{turns} turns of the loop during 64 MiB"
    assert float(x[0]) == 2.0
    assert float(x[-1]) == 2.0


def test_the_loop_turns_while_one_awaits(pair: World, loop: str) -> None:
    """Another task gets fifty turns before the operation can complete, and several during 64 MiB."""
    pair.run(keeps_turning, runner=loop)


async def many_small(me: Rank) -> None:
    turns, over = 0, False
    count = 60 if me.backend == "horovod" else 300  # one takes a cycle or more on Horovod, however small

    async def heartbeat() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await anyio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat)
        start = time.monotonic()
        for _ in range(count):
            await ac.all_reduce(torch.ones(1))
        took = time.monotonic() - start
        over = True
    wanted = min(20, int(took / 0.005))  # if all of them take 20 ms, there are few turns to give
    assert turns >= wanted, f"{turns} turns of the loop during {count} small operations in {took:.3f} s"


def test_a_stream_of_small_operations_lets_others_run(pair: World, loop: str) -> None:
    """Awaits that never need to sleep still yield from time to time."""
    pair.run(many_small, runner=loop)


# ---------------------------------------------------------------- world of one


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast"])
def test_is_done_at_once_alone(call: str) -> None:
    """In the serial world a work is done when it is returned."""
    work = getattr(ac, call)(torch.ones(2))
    assert work.done()
    oracle.same(work.result(), torch.ones(2))


def test_an_interruption_while_one_asks_for_the_error_is_no_error_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = ac.all_reduce(torch.ones(2))

    def interrupted(_work: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ac.Work, "_outcome", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.exception()
    assert work.exception() is None


@pytest.mark.parametrize(
    ("sequence", "told"),
    [(1, "#1"), (12, "#12"), (ROUND + 3, "#3 after 1 join"), (5 * ROUND + 4, "#4 after 5 joins")],
)
def test_the_number_of_a_call(sequence: int, told: str) -> None:
    """After a join all ranks count on from a common large number, which is not meant to be read."""
    assert numbered(sequence) == told


def test_as_completed_takes_what_ends_as_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It completes between the end of the wait and the look at what is in flight."""
    future: concurrent.futures.Future[int] = concurrent.futures.Future()

    class Late(arriving.Signal):
        async def wait(self, seconds: float = 0.0) -> bool:
            future.set_result(3)
            return False

    monkeypatch.setattr(arriving, "Signal", Late)

    async def main() -> list[int]:
        return [work.result() async for work in ac.as_completed([ac.adopt(future)], timeout=0.0)]

    assert asyncio.run(main()) == [3]


def test_what_is_dropped_again_and_again_on_one_line_warns_once() -> None:
    """Python can be told to show every warning."""
    for filters, times in (("default", 1), ("always", 3)):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter(filters)  # type: ignore[arg-type]  # a literal
            for _ in range(3):
                ac.all_reduce(1.0)
        assert len(heard) == times


def test_what_is_dropped_on_the_same_line_of_another_file_warns_too() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for file in ("one.py", "another.py", "one.py"):
            warn("was never awaited", Place(file, 1))
    assert [one.filename for one in heard] == ["one.py", "another.py"]

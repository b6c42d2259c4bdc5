"""Lanes: independent orders, who may use them, and what a refused call does to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
import oracle
import worlds
from asynccoll.host import actors
from asynccoll.plan.spec import ReduceOp
from asynccoll.runtime.process import current
from asynccoll.testing import simulate
from asynccoll.transport.progress import progress
from asynccoll.waiting.work import Work
from ranks import Rank, raising
from worlds import World


async def opposite(me: Rank, numel: int = 8, turns: int = 20) -> None:
    """Two tasks whose operations cross: rank 0 runs lane a before b, rank 1 b before a."""

    async def stream(name: str, scale: int) -> None:
        for turn in range(turns):
            x = torch.full((numel,), float(scale * (turn + 1)))
            oracle.same(await ac.all_reduce(x, lane=name), x * me.size)

    order = [("a", 1), ("b", 1000)]
    async with anyio.create_task_group() as tasks:
        for name, scale in order if me.rank % 2 else reversed(order):
            tasks.start_soon(stream, name, scale)


def test_two_tasks_in_opposite_order(world: World, loop: str) -> None:
    """Two tasks that use two lanes get the right results, although the ranks issue in different orders."""
    world.run(opposite, runner=loop)


async def crossed(me: Rank) -> None:
    names = ["left", "right"]
    if me.rank % 2:
        names.reverse()
    works = {name: ac.all_reduce(torch.full((4,), float(len(name))), lane=name) for name in names}
    for name in ("left", "right"):
        got = await me.get(works[name])
        oracle.same(got, torch.full((4,), float(len(name) * me.size)))


def test_one_caller_in_opposite_order(world: World, runner: str) -> None:
    """One task may also open and use two lanes in opposite order on two ranks."""
    world.run(crossed, runner=runner)


async def numbered_lanes(me: Rank) -> None:
    first, other, second = (
        ac.new_lane(kind) for kind in ("metrics of a test", "others", "metrics of a test")
    )
    assert first != second
    assert second.removesuffix(second[-1]) == first.removesuffix(first[-1]) == "metrics of a test "
    works = [ac.all_reduce(n, lane=name) for n, name in enumerate((first, other, second))]
    for n, work in enumerate(works):
        assert await work == n * me.size
    for name in (first, other, second):
        ac.close_lane(name)
    with raising(ac.InvalidArgumentError, "non-empty"):
        ac.new_lane("")


def test_lanes_named_by_number(pair: World) -> None:
    """Each object of a kind gets a name, the same on every rank."""
    pair.run(numbered_lanes)


async def named_by_context(me: Rank) -> None:
    with ac.lane("outer"):
        outer = ac.all_reduce(1)
        assert "outer" in repr(outer)
        async with ac.lane("inner"):
            inner = ac.all_reduce(2)
            assert "inner" in repr(inner)
            told = ac.all_reduce(3, lane="told")
            assert "told" in repr(told), "lane= does not go before the context"
        back = ac.all_reduce(4)
        assert "outer" in repr(back), "not restored"
    plain = ac.all_reduce(5)
    assert "outer" not in repr(plain)
    for k, work in enumerate((outer, inner, told, back, plain), start=1):
        assert await me.get(work) == k * me.size


def test_lane_is_a_context(pair: World, runner: str) -> None:
    """`with` and `async with ac.lane(name)` nest and end; an explicit lane= has priority."""
    pair.run(named_by_context, runner=runner)


async def inherited(me: Rank) -> None:
    seen = []

    async def child(value: int) -> None:
        work = ac.all_reduce(value)
        seen.append(repr(work))
        assert await work == value * me.size

    async with anyio.create_task_group() as tasks:
        with ac.lane("validation"):
            tasks.start_soon(child, 1)
    assert "validation" in seen[0]


def test_child_tasks_inherit_the_lane(pair: World, loop: str) -> None:
    """A task started inside `with ac.lane(...)` works on that lane."""
    pair.run(inherited, runner=loop)


async def in_generators(me: Rank) -> None:
    async def values() -> Any:
        with ac.lane("generator"):
            for k in range(3):
                yield await ac.all_reduce(k)

    got = []
    async for value in values():
        got.append(value)
    assert got == [0, me.size, 2 * me.size]


def test_a_lane_inside_an_async_generator(pair: World, loop: str) -> None:
    """Entering a lane in a generator and leaving it later raises nothing; the results are right."""
    pair.run(in_generators, runner=loop)


# ---------------------------------------------------------------- who may use a lane


async def interleaved(me: Rank) -> None:
    issued, finished = anyio.Event(), anyio.Event()

    async def owner() -> None:
        assert await ac.all_reduce(1) == me.size
        issued.set()
        await finished.wait()

    async def intruder() -> None:
        await issued.wait()
        try:
            with raising(ac.LaneOrderError, "lane=", "create_task_group", "`ac.isolated`") as caught:
                await ac.all_reduce(2)
        finally:
            finished.set()
        text = str(caught.error)
        assert text.count("test_lanes.py:") >= 2, f"does not tell both places: {text}"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner)
        tasks.start_soon(intruder)
    assert await ac.all_reduce(3) == 3 * me.size


def test_concurrent_tasks_on_one_lane_are_refused(pair: World, loop: str) -> None:
    """LaneOrderError names both call sites and the remedy, even with nothing in flight."""
    pair.run(interleaved, runner=loop)


async def children(me: Rank) -> None:
    async def child(value: int) -> None:
        for _ in range(3):
            assert await ac.all_reduce(value) == value * me.size

    assert await ac.all_reduce(1) == me.size
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child, 2)
    assert await ac.all_reduce(3) == 3 * me.size
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child, 4)
    assert await ac.all_reduce(5) == 5 * me.size


def test_a_child_may_follow_its_parent(pair: World, loop: str) -> None:
    """A child task may issue after its parent, and the parent again once the child has ended."""
    pair.run(children, runner=loop)


async def siblings_in_turn(me: Rank) -> None:
    async def child(value: int) -> None:
        assert await ac.all_reduce(value) == value * me.size

    for value in range(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, value)


def test_a_task_may_follow_one_that_has_ended(pair: World, loop: str) -> None:
    """Tasks that run one after the other share a lane."""
    pair.run(siblings_in_turn, runner=loop)


async def siblings_swapped(me: Rank, start: str) -> None:
    """The first caller ends before the second calls: on no rank do two tasks share the lane at a time."""
    first, ended = me.rank % 2, anyio.Event()

    async def call(value: int) -> None:
        await ac.all_reduce(value)

    async def job(index: int, value: int) -> None:
        if index != first:
            await ended.wait()
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            gc.collect()  # nothing refers to the other task any more
            with raising((ac.LaneOrderError, ac.PeerRefusedError), "already running, and has ended since"):
                await by_a_child(call, value, start)
            return
        await by_a_child(call, value, start)
        ended.set()

    jobs = [(0, 1), (1, 100)]
    if start.startswith("anyio"):
        async with anyio.create_task_group() as tasks:
            for one in jobs:
                tasks.start_soon(job, *one)
        return
    names: tuple[str | None, ...] = (None, None)
    if "named" in start:
        names = ("left", None if "one" in start else "right")
    if "after a call" in start:
        await ac.barrier()
    made = [asyncio.create_task(job(*one), name=name) for one, name in zip(jobs, names, strict=True)]
    await asyncio.gather(*made)


async def by_a_child(call: Callable[[int], Any], value: int, start: str) -> None:
    if start == "anyio, nested":
        error: list[Exception] = []

        async def child() -> None:
            try:
                await call(value)
            except ac.AsyncCollError as raised:
                error.append(raised)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        if error:
            raise error[0]
    elif start == "nested":
        await asyncio.wait({task := asyncio.create_task(call(value))})
        task.result()
    else:
        await call(value)


@pytest.mark.parametrize(
    ("start", "runner"),
    [
        *((start, loop) for start in ("anyio", "anyio, nested") for loop in ("asyncio", "trio")),
        *(
            (start, "asyncio")
            for start in (
                "unnamed",
                "nested",
                "named",
                "one named",
                "one named, after a call",
                "named, after a call",
            )
        ),
    ],
)
def test_siblings_that_take_turns_in_another_order_are_refused(pair: World, start: str, runner: str) -> None:
    """Each task is alone when it or its child calls, but which task calls first differs between ranks."""
    pair.run(siblings_swapped, start, runner=runner)


async def waits(me: Rank, how: str) -> None:
    """A task that is not the loop's first and has never called waits for a child that has a name."""

    async def child() -> None:
        await anyio.lowlevel.checkpoint()  # until the parent waits for it
        assert await ac.all_reduce(1) == me.size

    async def parent() -> None:
        if how == "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(child(), name="child")
        else:
            task = asyncio.create_task(child(), name="child")
            if how == "wait":
                await asyncio.wait({task})
            elif how == "await":
                await task
            else:
                wait: dict[str, Callable[[Any], Any]] = {
                    "gather": asyncio.gather,
                    "shield": asyncio.shield,
                    "wait_for": lambda one: asyncio.wait_for(one, 60),
                }
                await wait[how](task)
        assert await ac.all_reduce(2) == 2 * me.size

    first = asyncio.create_task(anyio.sleep_forever())
    await asyncio.create_task(parent())
    first.cancel()


_GROUP = pytest.param(
    "group", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup came with 3.11")
)


@pytest.mark.parametrize("how", ["await", "gather", _GROUP, "shield", "wait", "wait_for"])
def test_who_waits_for_a_named_child_may_follow_it(pair: World, how: str) -> None:
    """asyncio does not say who started the child, but the child's callbacks say who waits for it."""
    pair.run(waits, how, runner="asyncio")


def threads_swapped(me: Rank) -> None:
    first, ended = me.rank % 2, threading.Event()
    both = threading.Barrier(2)
    refused: list[str] = []

    def job(index: int) -> None:
        both.wait()
        if index == first:
            ac.all_reduce(1).wait()
            return
        ended.wait()
        try:
            ac.all_reduce(100).wait()
        except (ac.LaneOrderError, ac.PeerRefusedError) as error:
            refused.append(str(error))

    threads = [threading.Thread(target=job, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    threads[first].join()
    ended.set()
    threads[1 - first].join()
    assert len(refused) == 1 and "already running, and has ended since" in refused[0], refused

    def in_turn() -> None:
        assert ac.all_reduce(1).wait() == me.size

    for _ in range(3):
        thread = threading.Thread(target=in_turn)
        thread.start()
        thread.join()
    assert ac.all_reduce(2).wait() == 2 * me.size


@pytest.mark.processes
def test_threads_that_take_turns_in_another_order_are_refused(pair: World) -> None:
    """Threads that run one after the other are accepted, and so is the thread that started them."""
    pair.run(threads_swapped)


async def parent_swapped(me: Rank) -> None:
    called, ended = anyio.Event(), anyio.Event()

    async def child() -> None:
        if me.rank == 0:
            await ac.all_reduce(100)
        else:
            await called.wait()
            with raising(ac.LaneOrderError, "after it had started this one"):
                await ac.all_reduce(100)
        ended.set()

    assert await ac.all_reduce(1) == me.size
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child)
        if me.rank == 0:
            await ended.wait()
            with raising(ac.PeerRefusedError, "LaneOrderError"):
                await ac.all_reduce(1)
        else:
            await ac.all_reduce(1)
            called.set()


def test_a_parent_that_calls_before_its_child_on_one_rank_only_is_refused(pair: World, loop: str) -> None:
    """The parent's calls after it has started the child have no defined order with the child's calls."""
    pair.run(parent_swapped, runner=loop)


async def generations(me: Rank) -> None:
    """The owner started the child before it called; the child has ended; the grandchild goes on."""
    called = asyncio.Event()

    async def great_grandchild() -> None:
        with raising(ac.LaneOrderError, "after it had started this one"):
            ac.all_reduce(1)

    async def grandchild(parent: asyncio.Task[Any]) -> None:
        await ac.all_reduce(1, lane="generations")
        await parent
        await asyncio.create_task(great_grandchild())

    async def child() -> asyncio.Task[None]:
        await called.wait()
        await ac.all_reduce(1, lane="generations")
        me_task = asyncio.current_task()
        assert me_task is not None
        return asyncio.create_task(grandchild(me_task))

    await ac.barrier()
    started = asyncio.create_task(child())
    await ac.all_reduce(1)
    called.set()
    await (await started)


def test_what_an_ended_ancestor_called_orders_nothing_of_its_parent(pair: World) -> None:
    """A descendant of a task through one that has ended counts as started when the ended one was started."""
    pair.run(generations, runner="asyncio")


async def starters(me: Rank, start: str) -> None:
    """Of three generations the youngest calls first; the others have not called before."""

    async def child() -> None:
        assert await ac.all_reduce(1) == me.size

    async def parent() -> None:
        if start == "anyio":
            async with anyio.create_task_group() as inner:
                inner.start_soon(child)
        else:
            await asyncio.create_task(child())
        assert await ac.all_reduce(2) == 2 * me.size

    if start == "anyio":
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parent)
    else:
        await asyncio.create_task(parent(), name="parent" if start == "parent named" else None)
    assert await ac.all_reduce(3) == 3 * me.size


@pytest.mark.parametrize(
    ("start", "runner"),
    [("anyio", "trio"), *((start, "asyncio") for start in ("anyio", "unnamed", "parent named"))],
)
def test_who_has_waited_for_its_child_may_follow_it(pair: World, start: str, runner: str) -> None:
    """This holds also if the waiting task has never called, so nothing recorded that it started the child."""
    pair.run(starters, start, runner=runner)


def test_a_task_that_has_called_is_freed_as_it_ends(loop: str) -> None:
    """The task is freed together with its result, without a garbage collection."""

    async def child() -> None:
        actors.current()  # as each call does
        ended.append(weakref.ref(actors.trio_task() or asyncio.current_task()))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        await anyio.sleep(0)  # a loop holds the task that it ran last
        assert ended[0]() is None

    ended: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        anyio.run(main, backend=loop)
    finally:
        gc.enable()


async def in_to_thread(me: Rank) -> None:
    with ac.lane("threaded"):
        for _ in range(3):
            assert await ac.all_reduce(1) == me.size
            got = await anyio.to_thread.run_sync(lambda: ac.all_reduce(2).wait())
            assert got == 2 * me.size
        assert await ac.all_reduce(3) == 3 * me.size


def test_a_training_step_may_run_in_a_worker_thread(pair: World, loop: str) -> None:
    """to_thread passes the task's ancestry on; the idle worker thread does not keep the lane."""
    pair.run(in_to_thread, runner=loop)


async def jobs_of_a_pool(me: Rank) -> None:
    def waits(work: ac.Work[Any]) -> Callable[[], Any]:
        return work.wait

    for start in (anyio.to_thread.run_sync, asyncio.to_thread):
        for _ in range(10):  # the thread drops its job only a moment after it has reported the result
            work = await start(ac.all_reduce, torch.ones(2))
            oracle.same(await work, torch.full((2,), float(me.size)))
            with ac.coalescing():
                late = ac.all_reduce(torch.ones(3))
                oracle.same(await start(waits(late)), torch.full((3,), float(me.size)))
                oracle.same(await ac.all_gather(torch.ones(1)), torch.ones(me.size))


def test_a_job_that_is_a_function_of_ours(pair: World) -> None:
    """No frame of the user's is on the thread's stack; still, the lane is free when the job is done."""
    pair.run(jobs_of_a_pool)


# ---------------------------------------------------------------- task groups


async def grouped(me: Rank) -> None:
    results: dict[str, list[Any]] = {}

    async def stream(name: str, scale: int) -> None:
        results[name] = [await ac.all_reduce(scale + turn) for turn in range(10)]

    children: list[tuple[str, int]] = [("a", 10), ("b", 1000), ("c", 100_000)]
    async with ac.create_task_group() as tasks:
        for name, scale in children if me.rank % 2 else reversed(children):
            tasks.start_soon(stream, name, scale, name=name)
    for name, scale in children:
        assert results[name] == [me.size * (scale + turn) for turn in range(10)]


def test_children_of_a_task_group_have_lanes_of_their_own(world: World, loop: str) -> None:
    """Children that each rank starts in another order each get their own sums."""
    world.run(grouped, runner=loop)


async def same_name(me: Rank) -> None:
    release = anyio.Event()

    async def child() -> None:
        await release.wait()

    async with ac.create_task_group() as tasks:
        tasks.start_soon(child, name="twin")
        with raising(ValueError, "twin"):
            tasks.start_soon(child, name="twin")
        release.set()
    async with ac.create_task_group() as tasks:
        tasks.start_soon(child, name="twin")


def test_two_live_children_of_one_name_are_refused(pair: World, loop: str) -> None:
    """The lane is called parent/name, so only one live child at a time may have a name."""
    pair.run(same_name, runner=loop)


async def unnamed(me: Rank) -> None:
    """The next child starts while its predecessor still runs on some ranks and has ended on others."""
    results: dict[int, int] = {}
    started = [anyio.Event() for _ in range(3)]

    async def child(turn: int) -> None:
        started[turn].set()
        if me.rank:
            await started[-1].wait()
        results[turn] = await ac.all_reduce(10**turn)

    async with ac.create_task_group() as tasks:
        for turn in range(3):
            tasks.start_soon(child, turn)
            await started[turn].wait()
        with raising(ac.InvalidArgumentError, "still running"):
            await in_another_task(
                lambda: (tasks.start_soon(anyio.sleep, 0), tasks.start_soon(anyio.sleep, 0))
            )
    assert results == {turn: 10**turn * me.size for turn in range(3)}


async def in_another_task(function: Callable[[], object]) -> None:
    error: list[Exception] = []

    async def caught() -> None:
        try:
            function()
        except Exception as raised:
            error.append(raised)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(caught)
    raise error[0]


def test_children_of_one_function_are_numbered(pair: World, loop: str) -> None:
    """The group's task numbers them as it starts them; the order of other tasks may differ between ranks."""
    pair.run(unnamed, runner=loop)


async def too_many(me: Rank) -> None:
    with me.usual_room():
        works = [ac.all_reduce(k, lane=f"lane {k}") for k in range(31)]
        for k, work in enumerate(works):
            assert await me.get(work) == k * me.size
        assert await me.get(ac.all_reduce(1)) == me.size
        await me.refuses("33rd", ac.AsyncCollError, ac.all_reduce, 1, lane="one more", says=("32",))
        assert await me.get(ac.all_reduce(1, lane="lane 0")) == me.size


@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_more_than_32_lanes_are_refused(backend: str) -> None:
    """Lanes cost threads and descriptors; the 33rd is refused, and the others keep working."""
    with worlds.fresh(backend, 2) as world:
        world.run(too_many, timeout=60)


async def lanes_of_gradients(me: Rank) -> None:
    for name in ("mine/backward", "/backward"):
        with me.case(name):
            with raising(ac.InvalidArgumentError, "backward_lane"):
                ac.all_reduce(1, lane=name)
            with raising(ac.InvalidArgumentError, "backward_lane"):
                ac.lane(name)
            with raising(ac.InvalidArgumentError, "backward_lane"):
                ac.close_lane(name)
            with raising(ac.InvalidArgumentError, "backward_lane"):
                ac.backward_lane(name)
            with raising(ac.InvalidArgumentError, "backward_lane"):
                ac.prepare("all_reduce", torch.ones(1), lane=name)
            with raising(ac.InvalidArgumentError, "backward_lane"):
                ac.explain("all_reduce", torch.ones(1), lane=name)
    own = ac.backward_lane("mine")
    await me.check("by the public way", ac.all_reduce, 2, lane=own, expect=2 * me.size)
    with ac.lane(own):
        await me.check("in a context", ac.all_reduce, 3, expect=3 * me.size)
    with me.case("open"), raising(ac.InvalidArgumentError, "backward_lane"):
        ac.all_reduce(1, lane="mine/backward")
    ac.close_lane("mine")


def test_the_lanes_of_gradients_are_refused_by_name(pair: World) -> None:
    """Nothing checks there that two tasks do not cross, so a lane name alone must not give access."""
    pair.run(lanes_of_gradients, runner="asyncio")


# ---------------------------------------------------------------- refusals


def bad_avg() -> Any:
    """Make a call that is not defined for its dtype."""
    return ac.all_reduce(torch.ones(2, dtype=torch.int32), op="avg")


def bad_root() -> Any:
    """Make a call whose root does not exist."""
    return ac.broadcast(torch.ones(2), src=99)


def good_reduce() -> Any:
    """Make the call that the other ranks make."""
    return ac.all_reduce(torch.ones(2, dtype=torch.int32))


def good_broadcast() -> Any:
    """Make the call that the other ranks make."""
    return ac.broadcast(torch.ones(2), src=0)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "avg": (bad_avg, good_reduce, "avg"),
    "root": (bad_root, good_broadcast, "99"),
}


async def one_refuses(me: Rank, culprit: int, kind: str) -> None:
    bad, good, reason = KINDS[kind]
    if me.rank == culprit:
        await me.refuses("culprit", (ValueError, TypeError), bad)
    elif kind == "root":  # a broadcast may reach its receivers without the culprit
        await right_or_refused(me, "peer", good, torch.ones(2))
    else:
        says = (f"rank {culprit}", reason)
        await me.refuses("peer", ac.PeerRefusedError, good, says=says)
    for turn in range(2):
        await right_or_refused(me, f"behind {turn}", lambda: ac.all_reduce(7), 7 * me.size)
    await me.check("afterwards", ac.all_reduce, 8, expect=8 * me.size)


async def right_or_refused(me: Rank, label: str, call: Callable[[], Any], want: Any) -> None:
    """The call gives ``want``, or raises the typed error that says it was withdrawn."""
    with me.case(label):
        try:
            got = await me.get(call())
        except ac.PeerRefusedError:
            return
        oracle.same(got, want)


def test_one_rank_refuses(several: World, runner: str) -> None:
    """The peers of a refused call get a typed error that says why; the lane keeps working."""
    for kind in KINDS:
        for culprit in (0, several.size - 1):
            several.run(one_refuses, culprit, kind, runner=runner)


def failing_codec(me: Rank) -> Any:
    """Make a user's codec that cannot encode the object of rank 1."""

    def encode(_: object) -> bytes:
        if me.rank == 1:
            raise LookupError("mine")
        return b""

    return ac.Codec("own", encode, bytes)


async def refused_by_others_errors(me: Rank) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "mine": lambda: ac.all_gather_object(1, codec=failing_codec(me)),
        "5": lambda: ac.all_to_all(torch.ones(2), input_split_sizes=5 if me.rank == 1 else [1, 1]),
    }
    for reason, call in calls.items():
        with me.case(reason):
            if me.rank == 1:
                with raising((LookupError, ac.InvalidArgumentError), reason):
                    call()
            else:
                with raising(ac.PeerRefusedError, "rank 1", reason):
                    await me.get(call())
    await me.check("afterwards", ac.all_reduce, 8, expect=8 * me.size)


def test_an_error_that_is_not_ours_is_a_refusal_too(pair: World, runner: str) -> None:
    """For example, an error of a user's codec: the peers are told nevertheless."""
    pair.run(refused_by_others_errors, runner=runner)


async def tree_out_of_order(me: Rank) -> None:
    tree = {"a": torch.ones(2), "b": [torch.ones(3), 4]}
    if me.rank == 1:
        issued, over = anyio.Event(), anyio.Event()

        async def owns() -> None:
            await ac.all_reduce(1)
            issued.set()
            await over.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(owns)
            await issued.wait()
            with raising(ac.LaneOrderError):
                ac.all_reduce(tree)
            over.set()
    else:
        await ac.all_reduce(1)
        with raising(ac.PeerRefusedError, "LaneOrderError"):
            await ac.all_reduce(tree)
    await me.check(
        "afterwards",
        ac.all_reduce,
        tree,
        expect={"a": torch.full((2,), 2.0), "b": [torch.full((3,), 2.0), 8]},
    )


def test_a_tree_that_is_refused_for_its_order(pair: World, loop: str) -> None:
    """A tree takes one place in the lane's order, and its refusal takes the same one."""
    pair.run(tree_out_of_order, runner=loop)


def drains_what_is_refused(me: Rank) -> None:
    if me.rank == 1:
        with raising(ac.PayloadTypeError):
            bad_avg()
        me.see("it is over")
    else:
        work = good_reduce()
        work.detach()

        def tell() -> None:
            me.look_until_done(work, "nobody heard of the refusal")
            me.show("it is over")

        threading.Thread(target=tell, daemon=True).start()
    ac.finalize()


@pytest.mark.processes
def test_finalize_hears_of_a_refusal() -> None:
    """finalize does not wait for a call that a peer, which is still running, has refused."""
    with worlds.fresh("gloo", 2) as world:
        world.run(drains_what_is_refused, timeout=15)
        world.kill()


async def refused_amid_others(me: Rank) -> None:
    before = [ac.all_reduce(k) for k in range(3)]
    if me.rank == 1:
        await me.refuses("culprit", (ValueError, TypeError), bad_avg)
        refused = None
    else:
        refused = good_reduce()
    behind = []
    for k in range(3):
        try:
            behind.append(ac.all_reduce(k))
        except ac.AsyncCollError as error:
            behind.append(error)
    for k, work in enumerate(before):
        with me.case(f"before {k}"):
            oracle.same(await me.get(work), k * me.size)
    if refused is not None:
        with me.case("the refused one"), raising(ac.PeerRefusedError):
            await me.get(refused)
    for k, work in enumerate(behind):
        try:
            got = await me.get(work) if isinstance(work, ac.Work) else work
        except ac.CollectiveError:
            continue  # withdrawn with the refused one
        with me.case(f"behind {k}"):
            oracle.same(got, k * me.size)
    await me.check("afterwards", ac.all_reduce, 5, expect=5 * me.size)


def test_a_refusal_amid_operations_in_flight(several: World, runner: str) -> None:
    """Operations around a refused call give the right result or a typed error on every rank."""
    several.run(refused_amid_others, runner=runner, timeout=30)


async def refused_in_turn(me: Rank) -> None:
    for turn in range(2 * me.size):
        if turn % me.size == me.rank:
            await me.refuses(f"culprit {turn}", (ValueError, TypeError), bad_avg)
        else:
            says = (f"rank {turn % me.size}",)
            await me.refuses(f"peer {turn}", ac.PeerRefusedError, good_reduce, says=says)
    await me.check("afterwards", ac.all_reduce, 5, expect=5 * me.size)


def test_ranks_refuse_in_turn(several: World, runner: str) -> None:
    """Refusals of different ranks follow each other immediately; each error names the right rank."""
    several.run(refused_in_turn, runner=runner, timeout=40)


async def all_refuse(me: Rank) -> None:
    for turn in range(10):
        await me.refuses(f"refused {turn}", (ValueError, TypeError), bad_avg)
        await me.check(f"good {turn}", ac.all_reduce, turn, expect=turn * me.size)


def test_what_all_refuse_leaves_the_lane(world: World, runner: str) -> None:
    """If every rank refuses the call, nothing is sent and the lane is unchanged."""
    world.run(all_refuse, runner=runner)


async def refused_on_a_lane(me: Rank) -> None:
    other = ac.all_reduce(11, lane="other")
    if me.rank == 0:
        await me.refuses("culprit", (ValueError, TypeError), bad_avg)
    else:
        await me.refuses("peer", ac.PeerRefusedError, good_reduce)
    with me.case("the other lane"):
        oracle.same(await me.get(other), 11 * me.size)


def test_a_refusal_concerns_its_own_lane_only(pair: World, runner: str) -> None:
    """Another lane is not affected."""
    pair.run(refused_on_a_lane, runner=runner)


async def programs_and_calls(me: Rank) -> None:
    """Texts (lengths, then bytes), uneven gathers and plain sums are all in flight on one lane."""
    works: list[tuple[Any, Any]] = []
    for turn in range(8):
        texts = [f"{rank}" * (2000 * turn + rank) for rank in range(me.size)]
        works.append((ac.all_gather(texts[me.rank]), texts))
        works.append((ac.all_reduce(turn), turn * me.size))
        rows = [torch.full((rank * turn, 2), float(turn)) for rank in range(me.size)]
        works.append((ac.all_gather(rows[me.rank], uneven=True), rows))
    for turn, (work, expect) in enumerate(reversed(works)):
        with me.case(f"number {turn} from the end"):
            oracle.same(await me.get(work), expect)


def test_programs_keep_the_order_of_their_lane(world: World, runner: str) -> None:
    """Operations of one and of several messages are in flight together, and awaited in reverse order."""
    world.run(programs_and_calls, runner=runner)


def held_by_thread(me: Rank) -> None:
    """A blocking caller is followed by a loop in the same thread, then by blocking calls again."""
    assert ac.all_reduce(1).wait() == me.size

    async def main() -> None:
        assert await ac.all_reduce(2) == 2 * me.size

    asyncio.run(main())
    assert ac.all_reduce(3).wait() == 3 * me.size


def test_a_loop_may_follow_its_thread(pair: World) -> None:
    """The main thread, the loop it runs, and the thread afterwards share a lane."""
    pair.run(held_by_thread)


def torn_away(me: Rank, where: str) -> None:
    """Ctrl-C arrives on rank 0 while it waits for a program of two calls and drives it."""
    lane = current().world.lane()
    x = torch.ones(4)
    armed = me.rank == 0

    def interrupt() -> None:
        nonlocal armed
        if armed and threading.current_thread() is threading.main_thread():
            armed = False
            raise KeyboardInterrupt

    def rest(real: Callable[[], bool] = lane.queue._rest) -> bool:
        if where == "the lane":
            interrupt()
        return real()

    def program(communicator: Any) -> Any:
        yield communicator.all_reduce(x, ReduceOp.SUM)
        last = communicator.all_reduce(x, ReduceOp.SUM)
        if where == "the program":
            interrupt()
        return last

    ac.barrier().wait()
    lane.queue._rest = rest
    progress.watch = lambda _: None  # else it may take the program over from a waiter that is late
    try:
        if me.rank == 1:
            me.see("go")  # else the first call may have completed before anything waits for it
        work = Work((lane.run("twice", program, awaited_soon=True),), None)
        if me.rank == 0:
            me.show("go")
            with raising(KeyboardInterrupt):
                work.wait()
        elif where == "the lane":
            work.wait()
        with contextlib.suppress(ac.CollectiveError):  # that of the interrupted call itself
            work.wait()
    finally:
        del lane.queue._rest, progress.watch
    if where == "the program":  # how far it got is unknown: the peers see it and later calls as refused
        with contextlib.suppress(ac.PeerRefusedError):
            ac.all_reduce(1).wait()
    assert ac.all_reduce(1).wait() == me.size


@pytest.mark.processes
@pytest.mark.parametrize("where", ["the lane", "the program"])
def test_ctrl_c_in_a_waiter_that_drives_is_heard_and_stops_nobody(pair: World, where: str) -> None:
    """The error is raised where the program is waited for, and the lane keeps working."""
    pair.run(torn_away, where)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_a_call_that_its_lane_does_not_accept_leaves_out_as_it_was(transport: str, name: str) -> None:
    """The input had been copied there before the lane was asked."""
    kept: list[bool] = []

    async def main(rank: int) -> None:
        x, out = torch.ones(50_000), torch.full((50_000,), 7.0)
        arguments = {"src": 0} if name == "broadcast" else {}
        issued, over = anyio.Event(), anyio.Event()

        async def owns() -> None:
            await ac.barrier()
            issued.set()
            await over.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(owns)
            await issued.wait()
            with pytest.raises(ac.LaneOrderError):
                getattr(ac, name)(x, out=out, **arguments)
            kept.append(out.eq(7).all().item())
            over.set()
        assert (await getattr(ac, name)(x, out=out, lane="other", **arguments)) is out
        assert out.ne(7).all()

    simulate(main, world_size=2, transport=transport).check()
    assert kept == [True, True]

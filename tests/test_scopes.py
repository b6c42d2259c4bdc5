"""Lanes, scopes and task groups as contexts: shared by tasks, left out of turn, cancelled, outlived."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
import worlds
from ranks import Rank, raising

pytestmark = pytest.mark.filterwarnings("error::asynccoll.UnawaitedWorkWarning")


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Run a case in this process, which is a world of one whatever other tests have left."""
    ac.initialize("serial")
    yield lambda case, *args: anyio.run(case, *args, backend=request.param)
    ac.finalize()


async def here() -> str:
    """Return the lane on which this context issues."""
    work = ac.all_reduce(1)
    assert await work == 1
    return repr(work).split("lane ")[1].split("'")[1]


def failing(say: str) -> ac.Work[Any]:
    """Return a work that raises in its waiter."""

    def fail(_: Any) -> None:
        raise LookupError(say)

    return ac.all_reduce(1).map(fail)


# ---------------------------------------------------------------- one object, several tasks


async def shared_lane() -> None:
    lane = ac.lane("shared")
    inside = {name: anyio.Event() for name in "ab"}
    left = anyio.Event()

    async def enter(name: str, other: str) -> None:
        with ac.lane(f"of {name}"):
            async with lane:
                inside[name].set()
                await inside[other].wait()
                assert await here() == "shared"
                if name == "b":
                    await left.wait()
            assert await here() == f"of {name}"
            left.set()
        assert await here() == "default"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter, "a", "b")
        tasks.start_soon(enter, "b", "a")
    with lane, lane:
        assert await here() == "shared"
    assert await here() == "default"


def test_tasks_may_enter_one_lane_object(run: Callable[..., Any]) -> None:
    """Each task returns to the lane that it came from, whichever leaves first."""
    run(shared_lane)


async def shared_scope() -> None:
    scope = ac.scope()
    inside = {name: anyio.Event() for name in "ab"}
    raised = []

    async def enter(name: str, other: str) -> None:
        try:
            async with scope:
                inside[name].set()
                await inside[other].wait()
                failing(name).detach()
        except LookupError as error:
            raised.append((name, str(error)))
        else:
            raised.append((name, "nothing"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter, "a", "b")
        tasks.start_soon(enter, "b", "a")
    assert sorted(raised) == [("a", "a"), ("b", "b")]


def test_tasks_may_enter_one_scope_object(run: Callable[..., Any]) -> None:
    """Each task waits for its own works."""
    run(shared_scope)


# ---------------------------------------------------------------- async generators


async def on_a_lane() -> AsyncIterator[int]:
    with ac.lane("generator"):
        yield 1


async def in_a_scope(finished: list[int]) -> AsyncIterator[int]:
    async with ac.scope():
        ac.all_reduce(1).map(finished.append).detach()
        yield 1


async def out_of_turn() -> None:
    source = on_a_lane()
    async for _ in source:
        consumer = ac.lane("consumer")
        consumer.__enter__()
    assert await here() == "consumer"
    consumer.__exit__()
    assert await here() == "default"


def test_a_lane_that_is_left_out_of_turn(run: Callable[..., Any]) -> None:
    """A generator ends while a block that its consumer entered later is still open."""
    run(out_of_turn)


async def closed_elsewhere() -> None:
    finished: list[int] = []
    lanes, scopes = on_a_lane(), in_a_scope(finished)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, lanes)
        tasks.start_soon(anext, scopes)
    with ac.lane("closer"), raising(LookupError, "of the closer"):
        async with ac.scope():
            await lanes.aclose()  # type: ignore[attr-defined]
            await scopes.aclose()  # type: ignore[attr-defined]
            assert finished == [1]
            assert await here() == "closer"
            failing("of the closer").detach()
    assert await here() == "default"


def test_a_generator_that_is_closed_in_another_task(run: Callable[..., Any]) -> None:
    """Closing the generator ends what it entered; what the closing task has entered stays open."""
    run(closed_elsewhere)


# ---------------------------------------------------------------- scopes and time


async def nested() -> None:
    with raising(LookupError, "outer"):
        async with ac.scope():
            failing("outer").detach()
            with raising(LookupError, "inner"), ac.scope():
                failing("inner").detach()
            failing("outer, later").detach()


def test_scopes_nest(run: Callable[..., Any]) -> None:
    """Each scope has its own works, even after an inner scope has ended."""
    run(nested)


async def received() -> None:
    async with ac.scope():
        result = weakref.ref(await ac.all_reduce(torch.ones(3)))
        await ac.all_reduce(1)
        assert result() is None


def test_a_scope_does_not_keep_results_that_were_received(run: Callable[..., Any]) -> None:
    """Otherwise a training loop inside a scope would keep the gradients of many steps alive."""
    run(received)


async def outlived() -> None:
    left = anyio.Event()
    kept: list[Any] = []

    async def child(say: str) -> None:
        await left.wait()
        value = await ac.all_reduce(torch.ones(2))
        kept.append(weakref.ref(value))
        failing(say).detach()

    async with anyio.create_task_group() as tasks:
        with raising(LookupError, "late"):
            async with ac.scope():
                async with ac.scope():
                    tasks.start_soon(child, "late")
                left.set()
                await anyio.wait_all_tasks_blocked()
        left = anyio.Event()
        async with ac.scope():
            tasks.start_soon(child, "of nobody's interest")
        left.set()
        await anyio.wait_all_tasks_blocked()
        gc.collect()
        assert kept[1]() is None, "a scope that was left keeps results"


def test_a_child_that_outlives_its_scope(run: Callable[..., Any]) -> None:
    """What the child starts later belongs to the enclosing scope; without one, no scope keeps it."""
    run(outlived)


async def until_cancelled_again(times: int = 1) -> None:
    """Wait until a task of this loop has been cancelled ``times`` times and has reacted to that."""
    while not any(task.cancelling() >= times for task in asyncio.all_tasks()):
        await asyncio.sleep(0)
    await anyio.wait_all_tasks_blocked()


async def left_by(me: Rank, how: str) -> None:
    if me.rank == 1:
        me.see("cancelled")
        assert await ac.all_reduce(torch.ones(1)) == me.size
        return
    works = []

    async def block() -> None:
        async with ac.scope():
            works.append(ac.all_reduce(torch.ones(1)))

    async def timed() -> None:
        async with asyncio.timeout(0.01):
            await block()

    starts = {"cancel": block, "twice": block, "timeout": timed}
    waiting = asyncio.wait_for(block(), 0.01) if how == "wait_for" else starts[how]()
    task = asyncio.create_task(waiting)
    await anyio.wait_all_tasks_blocked()
    if how in ("cancel", "twice"):
        task.cancel()
    await until_cancelled_again()
    if how == "twice":
        task.cancel()
        await until_cancelled_again(2)
    assert not task.done(), "left with work outstanding"
    me.show("cancelled")
    expected = asyncio.CancelledError if how in ("cancel", "twice") else TimeoutError
    with raising(expected):
        await task
    assert works[0].done()
    assert await works[0] == me.size


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Task.cancelling and asyncio.timeout came with 3.11")
@pytest.mark.parametrize("how", ["cancel", "twice", "timeout", "wait_for"])
def test_a_scope_is_not_left_by_cancelling_its_task(pair: worlds.World, how: str) -> None:
    """The scope keeps waiting; then the cancellation, or the timeout that caused it, is raised."""
    pair.run(left_by, how)


async def shielded(me: Rank) -> None:
    if me.rank == 1:
        me.see("cancelled")
        assert await ac.all_reduce(torch.ones(1)) == me.size
        return
    async with anyio.create_task_group() as tasks:
        work = []

        async def block() -> None:
            async with ac.scope():
                work.append(ac.all_reduce(torch.ones(1)))

        tasks.start_soon(block)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert not work[0].done()
            me.show("cancelled")
    assert work[0].done()


def test_a_scope_is_shielded(pair: worlds.World, loop: str) -> None:
    """The cancel scopes of anyio and trio do not end the wait of the scope either."""
    pair.run(shielded, runner=loop)


def interrupted(me: Rank, where: str) -> None:
    if me.rank == 1:
        if where == "the end":
            me.see("interrupted")
        assert ac.all_reduce(torch.ones(1)).wait() == me.size
    else:
        with raising(KeyboardInterrupt), ac.scope():
            work = ac.all_reduce(torch.ones(1))
            if where == "the block":
                raise KeyboardInterrupt
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        assert work.done() is (where == "the block")
        me.show("interrupted")
        assert work.wait() == me.size
        with raising(LookupError, "mine"), ac.scope():
            failing_here().detach()
    assert ac.all_reduce(2).wait() == 2 * me.size


def failing_here() -> ac.Work[Any]:
    """``failing``, but of a call in which no other rank takes part."""
    group = ac.new_group([ac.get_rank()])

    def fail(_: Any) -> None:
        raise LookupError("mine")

    return ac.all_reduce(1, group=group).map(fail)


@pytest.mark.processes
@pytest.mark.parametrize("where", ["the block", "the end"])
def test_ctrl_c_in_a_blocking_scope(pair: worlds.World, where: str) -> None:
    """After Ctrl-C in the block the scope waits for its works; Ctrl-C during that wait ends the wait."""
    pair.run(interrupted, where)


# ---------------------------------------------------------------- children of a task group


class Stream:
    """An object with an async ``__call__``."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    async def __call__(self, value: int) -> None:
        assert await ac.all_reduce(value) == value
        self.seen.append(await here())


async def kinds_of_children() -> None:
    seen: list[str] = []
    stream = Stream(seen)

    async def plain(value: int) -> None:
        await stream(value)

    async def starts_others(group: Any) -> None:
        group.start_soon(plain, 1, name="sibling")
        async with ac.create_task_group() as own:
            own.start_soon(plain, 1)

    async with ac.create_task_group() as tasks:
        tasks.start_soon(stream, 1)
        tasks.start_soon(plain, 1)
        tasks.start_soon(partial(partial(plain), 1), name="named")
        tasks.start_soon(lambda: plain(1), name="lambda")
        tasks.start_soon(ac.all_reduce, 1)
        tasks.start_soon(starts_others, tasks)
    async with ac.create_task_group() as tasks:
        tasks.start_soon(partial(plain, 1))
    assert sorted(seen) == [
        "default/Stream",
        "default/lambda",
        "default/named",
        "default/plain",
        "default/plain",
        "default/sibling",
        "default/starts_others/plain",
    ]


def test_what_children_can_be_made_of(run: Callable[..., Any]) -> None:
    """Partials, objects, lambdas, and functions that return awaitables; each is named after its callee."""
    run(kinds_of_children)


async def refused_children() -> None:
    async def child() -> None:
        await anyio.lowlevel.checkpoint()

    async def backward() -> None:
        await child()

    async with ac.create_task_group() as tasks:
        wrong: list[tuple[Any, str]] = [
            (child(), "child, ...) instead of"),
            (lambda: 5, "returned int"),
            (5, "got int"),
            (partial(int, "3"), "int has returned int"),
        ]
        for function, says in wrong:
            with raising(ac.InvalidArgumentError, "start_soon takes an async function", says):
                tasks.start_soon(function, name="wrong")
        for name in ("", "a/b", "backward", 5):
            with raising(ac.InvalidArgumentError, repr(name), "name="):
                tasks.start_soon(child, name=name)  # type: ignore[arg-type]
        with raising(ac.InvalidArgumentError, "'backward'", "name="):
            tasks.start_soon(backward)
        with raising(ac.InvalidArgumentError, "already been entered"):
            await tasks.__aenter__()
        tasks.start_soon(child, name="wrong")  # the refused children have not taken the name
    for group in (tasks, ac.create_task_group()):
        with raising(ac.InvalidArgumentError, "enter the task group first"):
            group.start_soon(child)
    async with tasks:  # a second block of the same object, after the first has ended
        tasks.start_soon(child, name="wrong")


def test_what_no_child_can_be_made_of(run: Callable[..., Any]) -> None:
    """Coroutines, functions that are not async, bad names, and groups that are not entered are refused."""
    run(refused_children)


async def failing_children() -> None:
    async def child(say: str) -> None:
        with contextlib.suppress(ac.AsyncCollError):
            raise LookupError(say)

    for _ in range(2):
        with raising(Exception) as caught:
            async with ac.create_task_group() as tasks:
                tasks.start_soon(child, "mine", name="one")
        group: Any = caught.error
        assert [str(error) for error in group.exceptions] == ["'mine'"] or [
            error.args for error in group.exceptions
        ] == [("mine",)]


def test_errors_of_children(run: Callable[..., Any]) -> None:
    """The errors leave the block as a group, and the names can be used again."""
    run(failing_children)


def eagerly(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **given: Any
) -> asyncio.Task[Any]:
    """A task factory that starts each task at once, as asyncio's eager one does since Python 3.12."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, eager_start=True, **given)
    starting = asyncio.current_task()
    assert starting is not None
    task = asyncio.Task(coroutine, loop=loop, **given)
    first_step = loop._ready.pop()  # type: ignore[attr-defined]  # private: what the new task has scheduled
    asyncio.tasks._leave_task(loop, starting)
    first_step._run()
    asyncio.tasks._enter_task(loop, starting)
    return task


async def eager_children() -> None:
    lanes: list[str] = []

    async def ends_at_once() -> None:
        work = ac.all_reduce(1)
        lanes.append(repr(work).split("lane ")[1].split("'")[1])
        assert work.wait() == 1

    loop = asyncio.get_running_loop()
    loop.set_task_factory(eagerly)  # type: ignore[arg-type]  # the protocol has a generic coroutine
    try:
        async with ac.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(ends_at_once, name="one")
            assert lanes == ["default/one"] * 2, "not started eagerly"
    finally:
        loop.set_task_factory(None)


def test_children_that_start_eagerly() -> None:
    """A child that ends before ``start_soon`` returns leaves its name free."""
    ac.initialize("serial")
    asyncio.run(eager_children())
    ac.finalize()

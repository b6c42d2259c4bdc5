"""torch's modes by task: no task sees another's. Expected results come from the same block run alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import types
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import anyio
import pytest
import torch
import trio
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import asynccoll as ac
import oracle
import worlds
from asynccoll.modes import isolation
from ranks import Rank, raising
from struck import Strike

# ---------------------------------------------------------------- modes, and what they do


class Sevens(TorchFunctionMode):
    """A function mode: subtraction gives 7."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.tensor(7.0, device="cpu") if func is torch.sub else func(*args, **(kwargs or {}))


class Eights(TorchDispatchMode):
    """A dispatch mode: negation gives 8."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        negates = func is torch.ops.aten.neg.default
        return torch.tensor(8.0, device="cpu") if negates else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        yield


def doubling() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * 2)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "grad disabled": lambda: torch.set_grad_enabled(False),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "float16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast disabled": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "autocast of mps": lambda: torch.autocast("mps", torch.float16, enabled=False),
    "no_grad and autocast": evaluating,
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "functions": Sevens,
    "dispatch": Eights,
    "saved tensors": doubling,
    "nothing": contextlib.nullcontext,
}
names = pytest.mark.parametrize("name", MODES)


def behaviour() -> dict[str, Any]:
    """Return what torch does in the current modes."""
    x = torch.full((2, 2), 3.0, device="cpu", requires_grad=True)
    y = x * x
    return {
        "recorded": y.requires_grad,
        "gradient": float(torch.autograd.grad(y.sum(), x)[0][0, 0]) if y.requires_grad else None,
        "inference": y.is_inference(),
        "matmul": (x.detach() @ x.detach()).dtype,
        "autocast to": torch.get_autocast_dtype("cpu"),
        "caching": torch.is_autocast_cache_enabled(),
        "device": str(torch.empty(1).device),
        "default": str(torch.get_default_device()),
        "sub": float(torch.sub(x, x).detach().flatten()[0]),
        "neg": float(torch.neg(x).detach().flatten()[0]),
        "dispatching": is_in_torch_dispatch_mode(),
    }


@functools.cache
def inside(name: str) -> dict[str, Any]:
    """Return what torch does in the block ``name``, in a thread where nothing else runs."""
    found: list[dict[str, Any]] = []

    def look() -> None:
        with MODES[name]():
            found.append(behaviour())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_the_modes_can_be_told_apart() -> None:
    """Otherwise the tests below could not fail."""
    same = {"grad disabled": "no_grad", "default device": "device", "autocast of mps": "nothing"}
    for name in MODES:
        equals = {other for other in MODES if inside(other) == inside(name)}
        assert equals - {name} <= {same.get(name), *(k for k, v in same.items() if v == name)}, name


LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Run a case in each event loop; afterwards the thread must have the modes it had before."""
    before = behaviour()
    yield lambda case, *args: anyio.run(case, *args, **LOOPS[request.param])
    assert behaviour() == before


# ---------------------------------------------------------------- overlapping tasks

ORDERS = {
    "crossing": "a+ b+ a- b-",
    "nested": "a+ b+ b- a-",
    "after each other": "a+ a- b+ b-",
    "the other first": "b+ a+ b- a-",
}


class Turns:
    """Two tasks take steps in turn, and both look at their modes after each step."""

    def __init__(self, order: str) -> None:
        self.steps = order.split()
        self._looked = [0] * len(self.steps)
        self._events = [anyio.Event() for _ in range(len(self.steps) + 1)]
        self._events[0].set()

    async def follow(self, name: str, mode: str) -> None:
        expected = {"+": inside(mode), "-": inside("nothing")}
        now = "-"
        with ExitStack() as stack:
            for k, (who, what) in enumerate(self.steps):
                await self._events[k].wait()
                if who == name:
                    now = what
                    if what == "+":
                        stack.enter_context(MODES[mode]())
                    else:
                        stack.close()
                assert behaviour() == expected[now], f"{name} at {self.steps[k]}"
                self._looked[k] += 1
                if self._looked[k] == 2:
                    self._events[k + 1].set()
        await anyio.lowlevel.checkpoint()
        assert behaviour() == expected["-"]


async def in_a_group(order: str, a: str, b: str) -> None:
    turns = Turns(order)
    async with ac.create_task_group() as tasks:
        tasks.start_soon(turns.follow, "a", a, name="a")
        tasks.start_soon(turns.follow, "b", b, name="b")
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
            assert behaviour() == inside("nothing"), "a child's mode in the parent"


@names
def test_children_keep_their_modes_to_themselves(run: Callable[..., Any], name: str) -> None:
    """The other task has no mode, the same mode, or another one; the tasks overlap in each order."""
    for order in ORDERS.values():
        for other in ("nothing", name, "no_grad and autocast"):
            run(in_a_group, order, name, other)


async def in_tasks_of_asyncio(order: str, a: str, b: str) -> None:
    turns = Turns(order)
    tasks = [asyncio.create_task(ac.isolated(turns.follow(who, mode))) for who, mode in (("a", a), ("b", b))]
    await asyncio.gather(*tasks)


async def in_a_nursery(order: str, a: str, b: str) -> None:
    turns = Turns(order)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ac.isolated(turns.follow), "a", a)
        nursery.start_soon(ac.isolated(turns.follow), "b", b)


def test_isolated_does_it_for_tasks_of_anybody() -> None:
    """`isolated` takes a coroutine for asyncio, and a function for trio."""
    for order in ORDERS.values():
        asyncio.run(in_tasks_of_asyncio(order, "no_grad and autocast", "inference"))
        trio.run(in_a_nursery, order, "no_grad and autocast", "inference")


async def beside_a_plain_task() -> None:
    entered, looked = anyio.Event(), anyio.Event()

    async def isolated() -> None:
        with torch.no_grad(), torch.device("meta"):
            entered.set()
            await looked.wait()
            assert (behaviour()["recorded"], behaviour()["device"]) == (False, "meta")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ac.isolated(isolated))
        await entered.wait()
        with torch.autocast("cpu"):  # a plain task's mode: other plain code sees it, an isolated task not
            looked.set()
            await anyio.wait_all_tasks_blocked()
            assert behaviour() == inside("autocast")


def test_the_modes_of_plain_tasks_are_put_back(run: Callable[..., Any]) -> None:
    """Modes that other code of the loop has set are restored after each step of an isolated task."""
    run(beside_a_plain_task)


# ---------------------------------------------------------------- inheriting


async def inheriting(name: str) -> None:
    seen = []

    async def child(nested: bool) -> None:
        for _ in range(3):
            seen.append(behaviour())
            await anyio.lowlevel.checkpoint()
        if nested:
            async with ac.create_task_group() as grandchildren:
                grandchildren.start_soon(child, False)
                with MODES["autocast disabled"]():
                    await anyio.lowlevel.checkpoint()
        seen.append(behaviour())

    async with ac.create_task_group() as tasks:
        with MODES[name]():
            tasks.start_soon(child, True, name="inside")
        tasks.start_soon(seen_plain, name="outside")
        await anyio.lowlevel.checkpoint()
        assert behaviour() == inside("nothing")
    assert seen == [inside(name)] * 8


async def seen_plain() -> None:
    for _ in range(3):
        assert behaviour() == inside("nothing")
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("name", [name for name in MODES if not name.startswith("autocast ")])
def test_a_child_begins_in_the_modes_it_was_started_in(run: Callable[..., Any], name: str) -> None:
    """It does so whatever the parent has done since; so do its own children.

    (A block of autocast that disables it leaves nothing to inherit.)
    """
    run(inheriting, name)


@contextlib.contextmanager
def dispatching_elsewhere() -> Iterator[list[bool]]:
    """Another thread is in a dispatch mode. Yields a list, for what torch says in that thread at the end."""
    entered, leave = threading.Event(), threading.Event()
    found: list[bool] = []

    def hold() -> None:
        with Eights():
            entered.set()
            leave.wait()
            found.append(is_in_torch_dispatch_mode())

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        yield found
    finally:
        leave.set()
        thread.join()


def test_what_torch_says_of_another_threads_mode_is_not_inherited() -> None:
    """Regression: the first child said for good that a mode was entered, the second that none was."""

    async def look() -> bool:
        return is_in_torch_dispatch_mode()

    with dispatching_elsewhere(), torch.no_grad():
        first = ac.isolated(look())
    assert not asyncio.run(first)
    with torch.no_grad():
        second = ac.isolated(look())
    with dispatching_elsewhere() as found:
        asyncio.run(second)
    assert found == [True]
    assert not is_in_torch_dispatch_mode()


async def opposite() -> None:
    with torch.inference_mode():
        async with ac.create_task_group() as tasks:
            tasks.start_soon(turned_off)
            await anyio.lowlevel.checkpoint()
            assert behaviour() == inside("inference")
        assert behaviour() == inside("inference")


async def turned_off() -> None:
    assert behaviour()["inference"]
    with torch.inference_mode(False):
        await anyio.lowlevel.checkpoint()
        assert behaviour() == inside("nothing")
    await anyio.lowlevel.checkpoint()
    assert behaviour() == inside("inference")


def test_inference_mode_that_is_inherited_can_be_left(run: Callable[..., Any]) -> None:
    """Parent and child each hold a guard: both are left and entered again at every suspension."""
    run(opposite)


async def inline() -> None:
    async def leaves_it_on() -> str:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.inference_mode().__enter__()
        torch.autocast("cpu").__enter__()
        await anyio.lowlevel.checkpoint()
        return "done"

    with torch.autocast("cpu"):
        assert await ac.isolated(leaves_it_on()) == "done"
        assert behaviour() == inside("autocast")
    assert behaviour() == inside("nothing")


def test_what_is_left_on_ends_with_the_coroutine(run: Callable[..., Any]) -> None:
    """This holds also if the coroutine is awaited directly."""
    run(inline)


async def on_meta() -> str:
    with torch.device("meta"):
        await anyio.lowlevel.checkpoint()
    return str(torch.get_default_device())


def test_a_thread_that_never_had_a_default_device_has_none_after() -> None:
    """torch 2.9 tells 'never set' from None, and raises if asked for the device of None."""
    found: list[Any] = []

    def look() -> None:
        found.append(asyncio.run(ac.isolated(on_meta())))
        found.append(hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"))
        found.append(str(torch.get_default_device()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == ["cpu", False, "cpu"]


# ---------------------------------------------------------------- how a coroutine ends


async def failing() -> None:
    seen = []

    async def child() -> None:
        with MODES["no_grad and autocast"]():
            await anyio.lowlevel.checkpoint()
            try:
                raise LookupError("mine")
            finally:
                await anyio.lowlevel.checkpoint()
                seen.append(behaviour())

    with raising(Exception) as caught:
        async with ac.create_task_group() as tasks:
            tasks.start_soon(child)
    group: Any = caught.error
    assert [type(error) for error in group.exceptions] == [LookupError]
    assert seen == [inside("no_grad and autocast")]
    assert behaviour() == inside("nothing")


def test_errors_pass(run: Callable[..., Any]) -> None:
    """The group raises what the child raises; the child still has its modes while the error propagates."""
    run(failing)


async def cancelled(name: str) -> None:
    seen = []

    async def child() -> None:
        with MODES[name]():
            try:
                await anyio.sleep_forever()
            finally:
                seen.append(behaviour())
                with anyio.CancelScope(shield=True):
                    await anyio.lowlevel.checkpoint()
                seen.append(behaviour())

    async with ac.create_task_group() as tasks:
        tasks.start_soon(child)
        await anyio.wait_all_tasks_blocked()
        assert behaviour() == inside("nothing")
        tasks.cancel_scope.cancel()
    assert seen == [inside(name)] * 2
    assert behaviour() == inside("nothing")


@names
def test_a_cancelled_child_cleans_up_in_its_modes(run: Callable[..., Any], name: str) -> None:
    """trio and anyio cancel by throwing into the coroutine, or by withdrawing what the task waits for."""
    run(cancelled, name)


async def cancelled_by_task() -> None:
    seen = []

    async def child() -> None:
        with torch.inference_mode():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append(behaviour())
                raise

    begun = asyncio.create_task(ac.isolated(child()))
    await asyncio.sleep(0)
    not_begun = asyncio.create_task(ac.isolated(child()))
    for task in (begun, not_begun):
        task.cancel()
    assert [type(e) for e in await asyncio.gather(begun, not_begun, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    assert seen == [inside("inference")]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ac.isolated(child()), 0.01)
    assert behaviour() == inside("nothing")


def test_a_task_that_is_cancelled() -> None:
    """asyncio's own cancel works, also before the task has begun, and causes no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(cancelled_by_task())
        gc.collect()


def begun(name: str, seen: list[Any]) -> Any:
    """Make an isolated coroutine that waits inside the block ``name``."""

    class Never:
        def __await__(self) -> Any:
            yield

    async def waits() -> None:
        with MODES[name]():
            try:
                await Never()
            finally:
                seen.append(behaviour())

    coroutine = ac.isolated(waits())
    coroutine.send(None)
    return coroutine


@names
def test_a_coroutine_that_is_closed_or_dropped(name: str) -> None:
    """Its blocks end in its modes; the thread in which that happens has its own modes afterwards."""
    seen: list[Any] = []
    first = begun(name, seen)
    with torch.autocast("cpu"):
        first.close()
        assert behaviour() == inside("autocast")
    kept = [begun(name, seen)]
    kept.clear()
    gc.collect()
    assert behaviour() == inside("nothing")
    kept.append(begun(name, seen))
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    with pytest.raises(KeyError):
        begun(name, seen).throw(KeyError("thrown"))
    assert seen == [inside(name)] * 4
    assert behaviour() == inside("nothing")


async def in_generators(name: str) -> None:
    async def values() -> AsyncIterator[int]:
        for k in range(3):
            with MODES[name]():
                await anyio.lowlevel.checkpoint()
                assert behaviour() == inside(name)
                yield k

    async def child() -> None:
        got = []
        async with contextlib.aclosing(values()) as source:
            async for value in source:
                got.append(value)
                assert behaviour() == inside(name), "a with block around a yield holds for who asked, as ever"
                await anyio.lowlevel.checkpoint()
                if value == 1:
                    break
        assert got == [0, 1]
        assert behaviour() == inside("nothing")

    async with ac.create_task_group() as tasks:
        tasks.start_soon(child)
        tasks.start_soon(seen_plain)


@names
def test_async_generators_belong_to_the_task_that_asks(run: Callable[..., Any], name: str) -> None:
    """A block around a yield affects the generator's consumer, as without isolation, and no other task."""
    run(in_generators, name)


def test_loops_in_two_threads() -> None:
    """Modes also belong to a thread: two loops do not affect each other."""
    failed: list[BaseException] = []

    def loop(name: str) -> None:
        try:
            for _ in range(5):
                anyio.run(in_a_group, ORDERS["crossing"], name, "nothing")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=loop, args=(name,)) for name in ("inference", "no_grad and autocast")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# ---------------------------------------------------------------- as a coroutine, and as a function


async def answer(x: int, *, more: int = 0) -> int:
    await anyio.lowlevel.checkpoint()
    return x + more


def test_isolated_is_a_decorator(run: Callable[..., Any]) -> None:
    """The decorated function keeps its name, takes arguments, and returns a new coroutine on each call."""
    decorated = ac.isolated(answer)
    assert decorated.__name__ == "answer"

    async def main() -> None:
        assert [await decorated(1), await decorated(2, more=3)] == [1, 5]

    run(main)
    assert asyncio.run(ac.isolated(answer(4))) == 4


def test_what_cannot_be_isolated_is_refused() -> None:
    """For a task, a plain function or a plain value, the error says what to pass instead."""
    for wrong in (5, None):
        with raising(ac.InvalidArgumentError, type(wrong).__name__, "async function"):
            ac.isolated(wrong)  # type: ignore[call-overload]

    async def task() -> None:
        running = asyncio.create_task(answer(1))
        with raising(ac.InvalidArgumentError, "Task", "runs already"):
            ac.isolated(running)  # type: ignore[call-overload]
        await running

    asyncio.run(task())
    with raising(ac.InvalidArgumentError, "int", "no coroutine"):
        ac.isolated(int)("5")  # type: ignore[type-var]


def test_an_isolated_coroutine_that_nobody_awaits_is_named_once() -> None:
    """Python's warning names the user's coroutine, as for any coroutine, and comes once."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ac.isolated(answer(1))
        gc.collect()
    assert [str(one.message) for one in heard] == ["coroutine 'answer' was never awaited"]


def test_stacks_are_seen_through() -> None:
    """Tools that show where a task waits (trio's own, a debugger) find the user's frames."""

    async def deep() -> None:
        await trio.sleep_forever()

    async def outer() -> None:
        await deep()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ac.isolated(outer))
            await trio.testing.wait_all_tasks_blocked()
            (task,) = nursery.child_tasks
            found = [frame.f_code.co_name for frame, _ in task.iter_await_frames()]
            assert found.index("outer") < found.index("deep")
            assert "outer" in task.name
            nursery.cancel_scope.cancel()

    trio.run(main)


# ---------------------------------------------------------------- training alongside an evaluation

STEPS = 6


def model() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 2)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1) + rank


def stepped(net: torch.nn.Linear, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.data -= 0.05 * gradient


def loss_of(net: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return net(x).square().mean()


def trained_alone(size: int) -> list[torch.Tensor]:
    """Compute all ranks' parts in one process, with nothing running alongside."""
    net = model()
    for step in range(STEPS):
        parts = []
        for rank in range(size):
            net.zero_grad()
            loss_of(net, batch(step, rank)).backward()  # type: ignore[no-untyped-call]
            parts.append([p.grad for p in net.parameters() if p.grad is not None])
        stepped(net, [torch.stack(same).sum(0) / size for same in zip(*parts, strict=True)])
    return [p.detach() for p in net.parameters()]


async def training(me: Rank, mode: str) -> None:
    net = model()
    begun, over = anyio.Event(), anyio.Event()

    async def evaluate() -> None:
        """Evaluate in ``mode`` throughout, with the model that is being trained meanwhile."""
        rounds = 0
        with MODES[mode]():
            more = 1
            while more:
                score = net(batch(0, me.rank)).detach().float().sum()
                got = await ac.all_reduce(torch.ones(1))
                assert float(got) == me.size
                assert score.requires_grad is False
                more = await ac.all_reduce(0 if over.is_set() else 1)
                rounds += 1
                begun.set()
        assert rounds > 1

    async def train() -> None:
        for step in range(STEPS):
            net.zero_grad()
            loss = loss_of(net, batch(step, me.rank))
            assert float(await ac.all_reduce(torch.ones(1))) == me.size
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            assert len(gradients) == 2
            stepped(net, [await ac.all_reduce(gradient, op="avg") for gradient in gradients])
        await begun.wait()  # the evaluation must have run a round, however slow it is
        over.set()

    async with ac.create_task_group() as tasks:
        tasks.start_soon(evaluate)
        tasks.start_soon(train)
    for got, expect in zip(net.parameters(), trained_alone(me.size), strict=True):
        oracle.same(got.detach(), expect, rtol=1e-5)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "no_grad and autocast"])
@pytest.mark.parametrize("size", [2, 3])
def test_training_is_right_beside_a_background_evaluation(size: int, mode: str, loop: str) -> None:
    """The parameters on all ranks are those of a run without an evaluation."""
    worlds.world("gloo", size).run(training, mode, runner=loop, timeout=30)


@types.coroutine
def suspended() -> Iterator[None]:
    yield


async def without_gradients() -> None:
    with torch.no_grad():
        await suspended()


def test_a_task_that_ctrl_c_strikes_as_it_resumes_leaves_the_thread_its_modes() -> None:
    """What runs after the interrupt, in the same block, would have had torch's defaults."""
    steps = isolation.Steps(without_gradients())
    next(steps)
    with torch.inference_mode():
        with pytest.raises(KeyboardInterrupt), Strike(1, isolation._Away.bring_back.__code__):
            next(steps)
        assert torch.is_inference_mode_enabled()
    steps.close()

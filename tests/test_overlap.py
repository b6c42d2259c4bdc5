"""Gradients are reduced while backward runs: same results as one blocking all_reduce per parameter."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import asynccoll as ac
import oracle
import threads
from asynccoll.overlap.buckets import Bucket
from overlapping import SMALL, Heads, alike, averages, batch, check_gradients, close, loss_of, network, rows
from patience import patient
from ranks import Rank, raising
from worlds import World

# ---------------------------------------------------------------- same results as a blocking twin


async def against_blocking(me: Rank, in_thread: bool) -> None:
    ours, twin = network(), network()
    steps = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, twin)]
    with ac.overlap_gradients(ours, **SMALL) as gradients:
        for step in range(6):
            x = batch(me.rank, step)
            steps[0].zero_grad()
            loss = loss_of(ours, x)
            if in_thread:
                await anyio.to_thread.run_sync(loss.backward)
            else:
                loss.backward()
            await me.get(gradients)
            steps[0].step()

            steps[1].zero_grad()
            loss_of(twin, x).backward()
            for parameter in twin.parameters():
                parameter.grad = ac.all_reduce(parameter.grad, op="avg").wait()
            steps[1].step()
    for mine, its in zip(ours.parameters(), twin.parameters(), strict=True):
        assert close(mine, its)
        if me.size <= 2:  # a sum of two does not depend on its order
            oracle.same(mine.detach(), its.detach())


def test_same_parameters_as_a_blocking_run(world: World, runner: str) -> None:
    """Parameters are equal after some steps with momentum, bit for bit on one and two ranks."""
    world.run(against_blocking, False, runner=runner)


def test_backward_in_a_thread(world: World, loop: str) -> None:
    """Backward runs off the event loop, on any free thread; the lane accepts that."""
    world.run(against_blocking, True, runner=loop)


#: What sends from hooks of backward; each is made on its own line.
SENDING: dict[str, Callable[[nn.Module], Any]] = {
    "gradients": lambda model: ac.overlap_gradients(model, op="avg"),
    "layers": lambda model: ac.overlap.shard_layers(list(model.children()), reshard_after_forward=True),
    "optimizer": lambda model: ac.async_optim(torch.optim.SGD(model.parameters(), 0.1)),
    "ddp": lambda model: ac.overlap.DDPState(),
}


async def backward_by_nobody(me: Rank, kind: str, thread: str) -> None:
    run = IN_THREADS[thread]
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    made = SENDING[kind](model)
    if kind == "ddp":
        model.register_comm_hook(made, ac.overlap.ddp_hook)
    loss = torch.ones(2, 3)
    if kind == "layers":
        async for layer in made:
            loss = layer(loss)
    else:
        loss = model(loss)
    with ac.trace.recording() as timeline:
        await run(loss.sum().backward)
    if kind in ("gradients", "optimizer"):
        await (made.step() if kind == "optimizer" else made)
    sent = {
        span.place for span in timeline.spans if span.name in ("all_reduce", "reduce_scatter", "all_gather")
    }
    assert sent == {f"{__file__}:{SENDING[kind].__code__.co_firstlineno}"}


async def _in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    await asyncio.to_thread(thread.join)


IN_THREADS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "asyncio": asyncio.to_thread,
    "anyio": anyio.to_thread.run_sync,
    "threading": _in_a_thread,
}


@pytest.mark.parametrize("thread", IN_THREADS)
@pytest.mark.parametrize("kind", SENDING)
def test_calls_of_a_backward_in_a_thread_have_the_line_they_work_for(
    pair: World, kind: str, thread: str
) -> None:
    """No frame of the user's is on the stack; once, all these calls were attributed to a line of torch."""
    pair.run(backward_by_nobody, kind, thread, runner="asyncio")


def test_between_threads(runner: str) -> None:
    """The results are the same if the ranks are threads of one process."""
    threads.run(2, against_blocking, False, runner=runner)


async def against_ddp(me: Rank) -> None:
    ours, theirs = network(), DistributedDataParallel(network(), bucket_cap_mb=1e-3)
    with ac.overlap_gradients(ours, **SMALL) as gradients:
        for step in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                loss_of(model, batch(me.rank, step)).backward()
            await me.get(gradients)
            for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
                oracle.same(mine.grad, its.grad)


def test_same_gradients_as_ddp(pair: World, runner: str) -> None:
    """They are equal bit for bit on two ranks."""
    pair.run(against_ddp, runner=runner)


async def of_dtypes(me: Rank) -> None:
    torch.manual_seed(5)
    tensors = [torch.randn(7, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    tensors += [torch.randn((), dtype=torch.float32), torch.randn(3, 0), torch.randn(2, 3).t()]
    parameters = [nn.Parameter(x) for x in tensors]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    for op, total in (("sum", me.size * (me.size + 1) / 2), ("avg", (me.size + 1) / 2)):
        with ac.overlap_gradients([*parameters, frozen], op=op, **SMALL) as gradients:
            sum(p.double().sum() for p in parameters).mul(me.rank + 1).backward()
            await me.get(gradients)
        for parameter in parameters:
            oracle.same(parameter.grad, torch.full_like(parameter, total).detach(), rtol=1e-2)
            parameter.grad = None
        assert frozen.grad is None


def test_dtypes_shapes_and_ops(world: World, runner: str) -> None:
    """One model has several dtypes, with scalars, empty and strided parameters, under sums and averages."""
    world.run(of_dtypes, runner=runner)


async def in_a_group(me: Rank) -> None:
    group = ac.new_group([0, 2])
    model = network()
    if me.rank not in (0, 2):
        with raising(ac.InvalidArgumentError, f"rank {me.rank}"):
            ac.overlap_gradients(model, group=group)
        return
    with ac.overlap_gradients(model, group=group, **SMALL) as gradients:
        loss_of(model, batch(me.rank, 0)).backward()
        await me.get(gradients)
    want = averages(model, 2, lambda twin, index: loss_of(twin, batch(2 * index, 0)).backward())
    check_gradients(model, want)


def test_in_a_group(four: World, runner: str) -> None:
    """Gradients are averaged over the members only."""
    four.run(in_a_group, runner=runner)


# ---------------------------------------------------------------- overlap


class Look(torch.autograd.Function):
    """The identity; its backward calls ``look``, which sees the state at that moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient, None


async def leaves_early(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    seen: list[str] = []
    with ac.overlap_gradients(model, **SMALL) as gradients, ac.trace.recording() as timeline:
        x = Look.apply(model[0](torch.ones(3, 8)), lambda: seen.append(repr(gradients)))
        model[2](model[1](x)).sum().backward()
        assert repr(gradients).endswith("3 of 3 buckets sent>")
        await me.get(gradients)
        assert repr(gradients).endswith("0 of 3 buckets sent>")
    assert seen[0].endswith("2 of 3 buckets sent>"), "backward of the first layer was still to come"
    sent = [span for span in timeline.spans if span.is_operation]
    assert {span.row for span in sent} == {"gradients/backward"}
    # In reverse order, with a flag for each parameter; the first bucket also has one for each rank.
    counts = [16 * 4 + 4 + 2 + me.size, 16 * 16 + 16 + 2, 16 * 8 + 16 + 2]
    assert [span.size_bytes for span in sent] == [4 * count for count in counts]


def test_buckets_leave_during_backward(world: World, runner: str) -> None:
    """When backward reaches the first layer, the buckets of the others have been sent."""
    world.run(leaves_early, runner=runner)


async def in_order(me: Rank) -> None:
    model = alike(Heads())
    gradients = ac.overlap_gradients(model, bucket_bytes=1, first_bucket_bytes=1)
    with gradients, ac.trace.recording() as timeline:
        # The ranks use their heads in different orders, and none uses the last one.
        model(rows(me.rank, 0), [0, 1] if me.rank % 2 else [1, 0]).backward()
        assert "0 of 8 buckets" in repr(gradients), "what is before them has not left"
        await me.get(gradients)
    # Padded to 16 bytes, plus a flag; the first, of the last layer, also has one for each rank.
    sizes = [-(-p.numel() // 4) * 4 + 1 for p in model.parameters()]
    sizes[-1] += me.size
    sent = [span.size_bytes for span in timeline.spans if span.is_operation]
    assert sent == [4 * size for size in reversed(sizes)]


def test_buckets_leave_in_order(pair: World, runner: str) -> None:
    """A full bucket waits for those before it, so that all ranks send the same."""
    pair.run(in_order, runner=runner)


# ---------------------------------------------------------------- unused parameters


async def unused(me: Rank, steps: int) -> None:
    model = alike(Heads())
    with ac.overlap_gradients(model, **SMALL) as gradients:
        for step in range(steps):
            used = [[0], [0, 1], [1]][step % 3] if me.rank else [0]
            model.zero_grad(set_to_none=step % 2 == 0)
            model(rows(me.rank, step), used).backward()
            await me.get(gradients)

            def backward(twin: nn.Module, rank: int, step: int = step) -> None:
                twin(rows(rank, step), [[0], [0, 1], [1]][step % 3] if rank else [0]).backward()

            want = averages(model, me.size, backward)
            if step % 2:  # gradients were zeroed and not dropped, so they existed before this backward
                want = [
                    torch.zeros_like(p) if mean is None and p.grad is not None else mean
                    for p, mean in zip(model.parameters(), want, strict=True)
                ]
            check_gradients(model, want)
            assert model.heads[2].weight.grad is None, "nobody used it"


def test_unused_parameters(world: World, runner: str) -> None:
    """Ranks without a gradient give zeros; if none has one, it stays None; buffers are reused correctly."""
    world.run(unused, 6, runner=runner)


async def without_data(me: Rank) -> None:
    model = network()
    busy = me.size - 1  # only the last rank has data
    with ac.overlap_gradients(model, **SMALL) as gradients:
        if me.rank == busy:
            loss_of(model, batch(me.rank, 0)).backward()
        await me.get(gradients)

    def backward(twin: nn.Module, rank: int) -> None:
        if rank == busy:
            loss_of(twin, batch(rank, 0)).backward()

    check_gradients(model, averages(model, me.size, backward))


def test_a_rank_without_data(world: World, runner: str) -> None:
    """The rank awaits, contributes zeros, and gets the average like every other rank."""
    world.run(without_data, runner=runner)


async def nobody_has_data(me: Rank) -> None:
    model = network()
    with ac.overlap_gradients(model, **SMALL) as gradients:
        await me.get(gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_rank_has_data(pair: World, runner: str) -> None:
    """An await without a backward anywhere leaves the gradients None."""
    pair.run(nobody_has_data, runner=runner)


# ---------------------------------------------------------------- accumulation


async def accumulated(me: Rank, to_none: bool) -> None:
    model = network()
    with ac.overlap_gradients(model, **SMALL) as gradients:
        for turn in range(3):
            model.zero_grad(set_to_none=to_none)
            with gradients.no_sync():
                loss_of(model, batch(me.rank, turn)).backward()
                loss_of(model, batch(me.rank, turn + 10)).backward()
                assert "0 of" in repr(gradients)
            loss_of(model, batch(me.rank, turn + 20)).backward()
            await me.get(gradients)

            def backward(twin: nn.Module, rank: int, turn: int = turn) -> None:
                for part in (0, 10, 20):
                    loss_of(twin, batch(rank, turn + part)).backward()

            check_gradients(model, averages(model, me.size, backward))


@pytest.mark.parametrize("to_none", [True, False], ids=["dropped", "zeroed"])
def test_accumulation(world: World, runner: str, to_none: bool) -> None:
    """Gradients accumulated under no_sync are sent with the next backward."""
    world.run(accumulated, to_none, runner=runner)


async def gathered_and_then_unused(me: Rank) -> None:
    model = alike(Heads())
    with ac.overlap_gradients(model, **SMALL) as gradients:
        with gradients.no_sync():
            model(rows(me.rank, 0), [1]).backward()
        model(rows(me.rank, 1), [0]).backward()
        await me.get(gradients)

    def backward(twin: nn.Module, rank: int) -> None:
        twin(rows(rank, 0), [1]).backward()
        twin(rows(rank, 1), [0]).backward()

    check_gradients(model, averages(model, me.size, backward))


def test_accumulated_and_then_unused(world: World, runner: str) -> None:
    """An accumulated gradient is not lost if the last backward did not touch it."""
    world.run(gathered_and_then_unused, runner=runner)


# ---------------------------------------------------------------- failures


class StopError(Exception):
    """Raised by a layer in backward."""


def stop() -> None:
    raise StopError


async def stopped(me: Rank, failing: list[int]) -> None:
    model = alike(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)))
    before = copy.deepcopy(model.state_dict())
    x = torch.full((2, 8), float(me.rank + 1))
    with ac.overlap_gradients(model, **SMALL) as gradients:
        fails = me.rank in failing
        first = Look.apply(model[0](x), stop if fails else lambda: None)
        loss = model[2](model[1](first)).sum()
        with raising(StopError) if fails else contextlib.nullcontext():
            loss.backward()
        await me.get(gradients)  # a bucket of each rank is in flight: the step completes on all ranks

        model.zero_grad()
        loss_of(model, x).backward()
        await me.get(gradients)

    def backward(twin: nn.Module, rank: int) -> None:
        loss_of(twin, torch.full((2, 8), float(rank + 1))).backward()

    check_gradients(model, averages(model, me.size, backward))
    oracle.same(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["everywhere", "on one rank"])
def test_an_exception_in_the_middle_of_backward(pair: World, runner: str, failing: list[int]) -> None:
    """After the exception is caught and the await, the ranks are in step: the next gradients are right."""
    pair.run(stopped, failing, runner=runner)


async def raised_through(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    with raising(StopError):
        async with ac.overlap_gradients(model, **SMALL):
            model[1](Look.apply(model[0](torch.ones(2, 8)), stop)).sum().backward()
    model.zero_grad()
    with ac.overlap_gradients(model, **SMALL) as again:  # the lane and the parameters are free
        model(torch.ones(2, 8)).sum().backward()
        await me.get(again)


def test_an_exception_that_leaves_the_block(pair: World, runner: str) -> None:
    """It is not masked, nothing is waited for, and lane and parameters are free for another reducer."""
    pair.run(raised_through, runner=runner)


async def twice(me: Rank) -> None:
    model = network()
    with ac.overlap_gradients(model, **SMALL) as gradients:
        loss_of(model, batch(me.rank, 0)).backward()
        with raising(ac.InvalidArgumentError, "await", "no_sync"):
            loss_of(model, batch(me.rank, 1)).backward()
        await me.get(gradients)
    want = averages(model, me.size, lambda twin, rank: loss_of(twin, batch(rank, 0)).backward())
    check_gradients(model, want)


def test_a_second_backward_before_the_await(pair: World, runner: str) -> None:
    """It is refused, because it would add to gradients in flight; the step is that of the first backward."""
    pair.run(twice, runner=runner)


async def forgets_to_await(me: Rank, optimizer: str) -> None:
    model, other = network(), network()
    stepping = {"SGD": torch.optim.SGD, "Adam, fused": partial(torch.optim.Adam, fused=True)}[optimizer](
        model.parameters(), lr=0.1
    )
    before = [x.clone() for x in model.parameters()]
    with ac.overlap_gradients(model, **SMALL) as gradients:
        loss_of(model, batch(me.rank, 0)).backward()
        with raising(ac.InvalidArgumentError, "before the gradients", "await gradients"):
            stepping.step()
        for now, then in zip(model.parameters(), before, strict=True):
            assert torch.equal(now, then)
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # not affected
        await me.get(gradients)
        stepping.step()
        stepping.step()  # no matter why: the gradients are reduced
        with gradients.no_sync():
            loss_of(model, batch(me.rank, 1)).backward()
        stepping.step()  # deliberate, with this rank's own gradients
        model.zero_grad()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam, fused"])
def test_a_forgotten_await(pair: World, optimizer: str, runner: str) -> None:
    """The step is refused, because it would use gradients in flight; the first step must say so."""
    pair.run(forgets_to_await, optimizer, runner=runner)


async def unscales_too_early(me: Rank, fused: bool) -> None:
    """A scaler unscales too early, explicitly or in its step; then in time."""
    ours, twin = network(), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=fused) for model in (ours, twin)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with ac.overlap_gradients(ours, **SMALL) as gradients:
        for step, early in enumerate((scaler.unscale_, scaler.step)):
            optimizers[0].zero_grad()
            scaler.scale(loss_of(ours, batch(me.rank, step))).backward()
            with raising(ac.InvalidArgumentError, "a scaler unscales, before the gradients"):
                early(optimizers[0])
            await gradients
            scaler.unscale_(optimizers[0])
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[1].zero_grad()
            (sum(loss_of(twin, batch(rank, step)) for rank in range(me.size)) / me.size).backward()
            optimizers[1].step()
    assert all(map(close, ours.parameters(), twin.parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_before_the_await_is_refused(pair: World, fused: bool) -> None:
    """Regression: it wrote to buffers in flight, which torch does not count as a write; ranks diverged."""
    pair.run(unscales_too_early, fused)


async def kept(me: Rank, used: list[int], op: str) -> None:
    """Keep the gradients of each step, some of which do not exist on every rank."""
    model, twin = alike(Heads()), alike(Heads())
    parts = me.size if op == "sum" else 1
    with ac.overlap_gradients(model, op=op, **SMALL) as gradients:
        ours, theirs = [], []
        for step in range(3):
            model.zero_grad()
            if step != 1 or me.rank == 0:
                (model(rows(me.rank, step), used) / parts).backward()
            await gradients
            ours += [x.grad for x in model.parameters()]
            theirs += averages(twin, me.size, partial(one_step, step=step, used=used))
    wrong = [index for index, (x, y) in enumerate(zip(ours, theirs, strict=True)) if not close(x, y)]
    assert not wrong, f"gradients {wrong} are not what they were"


def one_step(model: nn.Module, rank: int, step: int, used: list[int]) -> None:
    if step != 1 or rank == 0:
        model(rows(rank, step), used).backward()


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("used", [[0, 1, 2], [1]], ids=["all", "some"])
def test_gradients_that_are_kept(several: World, used: list[int], op: str) -> None:
    """After zero_grad() the caller owns them, as in torch; once, the next step's overwrote them."""
    several.run(kept, used, op, runner="asyncio")


async def stepped_too_early(me: Rank, by_hook: str) -> None:
    """A step before the await, forgotten or in hooks of backward, would use each rank's own gradients."""
    model, x = network(), batch(me.rank, 0)
    steps = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        steps[parameter].step()
        steps[parameter].zero_grad()

    if by_hook == "before":
        for parameter in steps:
            parameter.register_post_accumulate_grad_hook(step)
    with ac.overlap_gradients(model, **SMALL) as gradients:
        if by_hook == "after":
            for parameter in steps:
                parameter.register_post_accumulate_grad_hook(step)
        with raising(ac.InvalidArgumentError, "an optimizer that steps in backward hooks"):
            loss_of(model, x).backward()
            if not by_hook:
                for parameter in steps:
                    step(parameter)
            await gradients
        if by_hook == "before":
            await gradients


@pytest.mark.parametrize("by_hook", ["", "before", "after"])
def test_a_step_before_the_await_is_refused(pair: World, by_hook: str) -> None:
    """Regression: the ranks' parameters diverged silently."""
    pair.run(stepped_too_early, by_hook)


def closures(me: Rank) -> None:
    """A closure that LBFGS calls several times a step waits in each call, or is refused in the second one."""
    model, x = network(), batch(0, 0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with ac.overlap_gradients(model, **SMALL) as gradients:
        for waits in (True, True, False):

            def closure(waits: bool = waits) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                if waits:
                    gradients.wait()
                return loss

            refused = raising(ac.InvalidArgumentError, "a second time before")
            with contextlib.nullcontext() if waits else refused:
                optimizer.step(closure)


def test_closures_that_wait_and_that_do_not(pair: World) -> None:
    pair.run(closures)


async def awaited_twice(me: Rank, dtype: torch.dtype, first: int) -> None:
    """On rank `first`, a second await meets the next gradients of the ranks above it."""
    group = ac.new_group(range(first, me.size))
    if me.rank < first:
        return
    model, others = network().to(dtype), list(range(1, me.size - first))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if me.rank == first:
        optimizer.step()  # as a program does to create its state: steps count from the first reduction on

    def backward(step: int) -> None:
        optimizer.zero_grad()
        if me.rank % 2:  # some ranks have more data for a step than others
            with gradients.no_sync():
                loss_of(model, batch(me.rank, 10 + step).to(dtype)).backward()
        loss_of(model, batch(me.rank, step).to(dtype)).backward()

    told = f"stepped since the last `await gradients` on the ranks {others}"
    with ac.overlap_gradients(model, group=group, **SMALL) as gradients:
        for step in range(2):
            backward(step)
            await gradients
            if me.rank > first or step == 0:
                optimizer.step()
        if me.rank > first:
            backward(2)
        with raising(ac.CollectiveMismatchError, told):
            await gradients
        backward(3)
        await gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_await_too_many(several: World, dtype: torch.dtype) -> None:
    """Regression: it took part in the others' next step, and the parameters diverged silently."""
    several.run(awaited_twice, dtype, 0, runner="asyncio")


async def cancelled(me: Rank) -> None:
    model = network()
    with ac.overlap_gradients(model, **SMALL) as gradients:
        for step in range(2):
            model.zero_grad()
            if me.rank == 0:
                loss_of(model, batch(0, step)).backward()
                with anyio.move_on_after(0.05) as limit:
                    await gradients
                assert limit.cancelled_caught, "nobody else has sent anything"
                with raising(ac.CollectiveTimeoutError):
                    gradients.wait(timeout=0.05)
                me.show(f"gave up {step}")
            else:
                await anyio.to_thread.run_sync(me.see, f"gave up {step}")
                loss_of(model, batch(me.rank, step)).backward()
            await gradients

            def backward(twin: nn.Module, rank: int, step: int = step) -> None:
                loss_of(twin, batch(rank, step)).backward()

            check_gradients(model, averages(model, me.size, backward))


def test_a_cancelled_await_is_taken_up_again(pair: World, loop: str) -> None:
    """After a cancellation or timeout the step is unchanged; the next await completes it."""
    pair.run(cancelled, runner=loop)


async def in_two_tasks(me: Rank, dtype: torch.dtype | None) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    seen: list[Tensor | None] = []
    with ac.overlap_gradients([parameter], reduce_dtype=dtype) as gradients:
        (parameter * (me.rank + 1)).sum().backward()

        async def first_then(then: Callable[[Tensor], None]) -> None:
            await gradients
            if not seen:
                assert parameter.grad is not None
                then(parameter.grad)
            seen.append(parameter.grad)

        def clear(_: Tensor) -> None:
            parameter.grad = None

        def clip(gradient: Tensor) -> None:
            gradient.mul_(100)

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(first_then, clear if dtype is None else clip)
        if dtype is None:
            assert seen == [None, None]
            assert parameter.grad is None
        else:
            oracle.same(parameter.grad, torch.full((2,), 150.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_two_tasks_await_one_step(pair: World, loop: str, dtype: torch.dtype | None) -> None:
    """The first task to resume may clip or zero the gradients. Regression: the second's await undid that."""
    pair.run(in_two_tasks, dtype, runner=loop)


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)
        self.last = nn.Linear(3, 2, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words)).sum()  # type: ignore[no-any-return]  # torch's call is untyped


def words(rank: int, step: int) -> list[int]:
    """Return words, some twice; none on the first rank in the second step, none on any rank in the third."""
    if step == 2 or (step == 1 and rank == 0):
        return []
    return [rank, rank, (3 * rank + step) % 7]


def counted(size: int, steps: Sequence[int]) -> list[int]:
    """Return how often each word occurs on all ranks."""
    found = [word for step in steps for rank in range(size) for word in words(rank, step)]
    return [found.count(word) for word in range(7)]


async def sparse(me: Rank, op: str, dtype: torch.dtype | None) -> None:
    model = Words()
    nn.init.ones_(model.last.weight)  # so each occurrence of a word adds 2 to its row's gradient
    optimizer = torch.optim.SparseAdam([model.table.weight], lr=0.1)
    share = me.size if op == "avg" else 1
    with ac.overlap_gradients(model, op=op, reduce_dtype=dtype, bucket_bytes=16) as gradients:
        for steps in ([0], [1], [2], [0, 1], [0, 1]):
            model.zero_grad()
            for step in steps:  # of two steps, both are sent, or the first is accumulated
                with gradients.no_sync() if step == 1 else contextlib.nullcontext():
                    if given := words(me.rank, step):
                        model(torch.tensor(given)).backward()
                if step == 0 or len(steps) == 1:
                    await me.get(gradients)
            if len(steps) == 2:
                await me.get(gradients)
            counts = counted(me.size, steps)
            expected = [[2 * n / share] * 3 for n in counts]
            got = model.table.weight.grad
            if not any(counts):
                assert got is None
                continue
            assert got is not None
            assert got.is_sparse
            oracle.same(got.to_dense(), torch.tensor(expected), rtol=1e-6)
            optimizer.step()
            oracle.same(*(await me.get(ac.all_gather(model.table.weight.detach()[None])))[[0, -1]])


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_sparse_gradients_stay_sparse(world: World, loop: str, op: str, dtype: torch.dtype | None) -> None:
    """The rows of all ranks are added up; a rank may have none, and steps may add to earlier ones."""
    world.run(sparse, op, dtype, runner=loop)


async def views_made(me: Rank) -> None:
    model, made = network(), []
    views = Bucket._views
    with pytest.MonkeyPatch.context() as patch, ac.overlap_gradients(model, **SMALL) as gradients:
        patch.setattr(Bucket, "_views", lambda bucket: made.append(bucket) or views(bucket))
        for step in range(4):
            model.zero_grad()
            loss_of(model, batch(me.rank, step)).backward()
            await me.get(gradients)
    assert not made


def test_views_of_buckets_are_made_once(pair: World) -> None:
    """Regression: each step made a new view for each gradient, and copied the gradient."""
    pair.run(views_made)


async def frozen_before_backward(me: Rank) -> None:
    """From the second step on, backward checks whether its gradients are added to sums."""
    model = network()

    def backward(twin: Any, rank: int) -> None:
        lost = loss_of(twin, batch(rank, 0))
        twin[0].requires_grad_(False)
        lost.backward()
        twin[0].requires_grad_(True)

    want = averages(model, me.size, backward)
    with ac.overlap_gradients(model, op="sum", **SMALL) as gradients:
        for step in range(3):
            model.zero_grad()
            backward(model, me.rank)
            await me.get(gradients)
            check_gradients(model, [x if x is None else x * me.size for x in want])
            if not step:
                loss_of(model, batch(me.rank, 0)).backward()
                await me.get(gradients)


def test_parameters_frozen_between_forward_and_backward(pair: World) -> None:
    pair.run(frozen_before_backward)


def test_hooks_warn_of_nothing_where_a_parameter_is_sent_to_another_process() -> None:
    model = network()
    with ac.overlap_gradients(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        for parameter in model.parameters():
            torch.utils.hooks.warn_if_has_hooks(parameter)


async def sparse_without_rows(me: Rank) -> None:
    """Only the first rank has a gradient, of an empty batch; the momentum moves it as in one process."""
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5, momentum=0.5)
    with ac.overlap_gradients(table, op="sum") as gradients:
        for given in ([me.rank], [], None):
            optimizer.zero_grad()
            if given or (given == [] and me.rank == 0):
                table(torch.tensor(given, dtype=torch.int64)).sum().backward()
            await me.get(gradients)
            optimizer.step()
    assert table.weight.grad is None
    moved = [row < me.size for row in range(4)]
    oracle.same(table.weight.detach(), torch.tensor([[1 - 0.75 * has] * 2 for has in moved]))


def test_sparse_gradients_without_rows(world: World, loop: str) -> None:
    """Regression: ranks without a gradient did not step, and diverged silently."""
    world.run(sparse_without_rows, runner=loop)


async def sparse_later(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with ac.overlap_gradients(model) as gradients:
        model(torch.ones(1, 3)).sum().backward()
        await me.get(gradients)
        table = nn.Embedding(7, 3, sparse=True)
        model.append(table)
        nn.init.ones_(table.weight)  # the same on all ranks, which is checked
        for _ in range(2):  # the table takes part from the first await on
            model.zero_grad()
            table(torch.tensor(words(me.rank, 0))).sum().backward()
            await me.get(gradients)
            assert table.weight.grad is not None
            expected = [[n / me.size] * 3 for n in counted(me.size, [0])]
            oracle.same(table.weight.grad.to_dense(), torch.tensor(expected), rtol=1e-6)


def test_a_table_that_is_added_later(pair: World) -> None:
    pair.run(sparse_later)


async def sparse_beside_dense(me: Rank) -> None:
    table = nn.Embedding(7, 3, sparse=True)
    with ac.overlap_gradients(table, op="sum") as gradients:
        (table(torch.tensor(words(me.rank, 0))).sum() + table.weight.sum()).backward()
        await me.get(gradients)
        assert table.weight.grad is not None
        expected = [[float(n + me.size)] * 3 for n in counted(me.size, [0])]
        oracle.same(table.weight.grad, torch.tensor(expected))
    with (
        ac.overlap_gradients(list(table.parameters())),
        raising(ac.PayloadTypeError, "overlap_gradients the module"),
    ):
        table.zero_grad()
        table(torch.tensor([me.rank])).sum().backward()


def test_a_table_that_is_used_densely_too_has_a_dense_gradient(pair: World) -> None:
    """Without the module, sparse gradients cannot be foreseen: they are refused."""
    pair.run(sparse_beside_dense)


REFUSED = {
    "nothing to reduce": (lambda: ac.overlap_gradients([torch.ones(2)]), "requires_grad"),
    "not a leaf": (
        lambda: ac.overlap_gradients([torch.ones(2).requires_grad_() * 1]),
        "was computed from others",
    ),
    "op": (lambda: ac.overlap_gradients(network(), op="max"), "'max'"),
    "size": (lambda: ac.overlap_gradients(network(), bucket_bytes=0), "bucket_bytes"),
    "lane": (lambda: ac.overlap_gradients(network(), lane=""), "lane"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """The call is refused before anything is sent, with a typed error that says what is wrong."""
    call, says = REFUSED[name]
    with pytest.raises(ac.InvalidArgumentError, match=says):
        call()


def test_two_reducers_share_neither_lane_nor_parameters() -> None:
    """The error says what to do: close() or another lane."""
    model, other = network(), network()
    with ac.overlap_gradients(model) as gradients:
        with pytest.raises(ac.InvalidArgumentError, match="lane="):
            ac.overlap_gradients(other)
        with pytest.raises(ac.InvalidArgumentError, match="close"):
            ac.overlap_gradients(model, lane="another")
        with ac.overlap_gradients(other, lane="another"):
            assert "'gradients/backward'" in repr(gradients)
    ac.overlap_gradients(other).close()


async def beside_another(me: Rank, kind: str) -> None:
    other = ac.overlap_gradients(network(), init_sync=False) if me.rank == 0 else None
    if kind == "in a circle":
        circle: list[object] = [other]
        circle.append(circle)
        del other, circle
        ac.overlap_gradients(network()).close()
        return
    with raising(ac.PeerRefusedError if me.rank else ac.InvalidArgumentError, "alive on this lane"):
        ac.overlap_gradients(network())
    if other is not None:
        other.close()
    ac.overlap_gradients(network()).close()


@pytest.mark.parametrize("kind", ["in a circle", "alive"])
def test_the_reducer_that_one_rank_has_yet_is_told_to_all(pair: World, kind: str) -> None:
    """Garbage is collected at different times on each rank; peers would wait for the rank that refuses."""
    pair.run(beside_another, kind)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


#: By helper: makes it as it should be, or in a way that is refused.
HALF_REFUSED: dict[str, Callable[[nn.Module, bool], Any]] = {
    "overlap_gradients": lambda model, wrong: ac.overlap_gradients(model, op="max" if wrong else "avg"),
    "async_optim": lambda model, wrong: ac.async_optim(sgd(model), bucket_bytes=0 if wrong else 1024),
    "shard_optimizer": lambda model, wrong: ac.overlap.shard_optimizer(
        model, torch.optim.LBFGS(model.parameters()) if wrong else sgd(model)
    ),
    "average_parameters": lambda model, wrong: averaged(model, 0 if wrong else 1),
}


def averaged(model: nn.Module, every: int) -> contextlib.ExitStack:
    """Make an averager, and wait for a round: alone of these helpers, it does not wait as it is made."""
    ac.overlap.average_parameters(model, every=every).wait()
    return contextlib.ExitStack()


async def refused_on_one(me: Rank, name: str) -> None:
    make, told = HALF_REFUSED[name], ac.PeerRefusedError if me.rank else ac.AsyncCollError
    with raising(told) as caught:
        make(network(), me.rank == 0)
    if me.rank:
        assert isinstance(caught.error, ac.PeerRefusedError)
        assert caught.error.ranks == (0,)
    make(network(), False).close()


@pytest.mark.parametrize("name", HALF_REFUSED)
def test_a_helper_that_one_rank_cannot_make_is_refused_on_all(several: World, name: str) -> None:
    """The others would wait for that rank, which sends nothing; the next one works on every rank."""
    several.run(refused_on_one, name, runner="asyncio", timeout=patient(20))


async def refused_at_the_await(me: Rank) -> None:
    """Rank 1 awaits without a backward, and its gradients, sums that it has replaced, cannot be summed."""
    model = network()
    with ac.overlap_gradients(model, op="sum", lane="replaced sums", **SMALL) as gradients:
        loss_of(model, batch(me.rank, 0)).backward()
        await gradients
        if me.rank:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()
        else:
            loss_of(model, batch(me.rank, 1)).backward()
        told = ac.InvalidArgumentError if me.rank else ac.PeerRefusedError
        with raising(told, "is not the tensor that was summed over all ranks"):
            await gradients
        model.zero_grad()
        means = averages(model, me.size, lambda twin, rank: loss_of(twin, batch(rank, 2)).backward())
        loss_of(model, batch(me.rank, 2)).backward()
        await gradients
        check_gradients(model, [None if mean is None else mean * me.size for mean in means])


def test_gradients_that_one_rank_cannot_send_are_refused_on_all(pair: World) -> None:
    """The others hear of it where they wait, and all can go on. Regression: they waited in vain."""
    pair.run(refused_at_the_await, runner="asyncio", timeout=patient(10))


async def through_the_other(me: Rank) -> None:
    generator, discriminator = nn.Linear(3, 3), nn.Linear(3, 1)
    ours = ac.overlap_gradients(generator, lane="generator")
    with ours, ac.overlap_gradients(discriminator, lane="discriminator") as others:
        for held_back in (True, False):
            with others.no_sync() if held_back else contextlib.nullcontext():
                discriminator(generator(rows(me.rank, 1)[:, :3])).sum().backward()
            await ours
            discriminator.zero_grad()
            refused = raising(ac.InvalidArgumentError, "'discriminator/backward'", "another model's loss")
            with contextlib.nullcontext() if held_back else refused:
                discriminator(rows(me.rank, 2)[:, :3]).sum().backward()
            if held_back:
                await others


def test_the_loss_of_another_model_goes_through_this_one(pair: World) -> None:
    """A generator's loss passes the discriminator; the error says which model that is, and what to do."""
    pair.run(through_the_other)


# ---------------------------------------------------------------- closing


def test_closed_it_leaves_backward_alone() -> None:
    """No hook of the reducer is left, and gradients are what they would be without it."""
    model = network()
    with ac.overlap_gradients(model, **SMALL):
        pass
    loss_of(model, batch(0, 0)).backward()
    want = averages(model, 1, lambda twin, _: loss_of(twin, batch(0, 0)).backward())
    check_gradients(model, want)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_dropped_it_takes_its_hooks_along() -> None:
    """A reducer without references is freed at once, with its buckets and hooks."""
    model = network()
    gc.disable()
    try:
        gone = weakref.ref(ac.overlap_gradients(model))
        assert gone() is None
    finally:
        gc.enable()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


async def from_source(me: Rank) -> None:
    torch.manual_seed(me.rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(me.rank)
    model[1].num_batches_tracked.fill_(me.rank)
    model.register_buffer("repeated", torch.full((3, 1), me.rank).expand(3, 2).t())
    kept = [parameter.data_ptr() for parameter in model.parameters()]
    await me.get(ac.overlap.broadcast_parameters(model, src=me.size - 1))
    torch.manual_seed(me.size - 1)
    oracle.same(model[0].weight.detach(), nn.Linear(4, 4).weight.detach())
    assert model[1].running_mean.tolist() == [me.size - 1] * 4
    assert model[1].num_batches_tracked.item() == me.size - 1
    assert model.repeated.tolist() == [[me.size - 1] * 3] * 2  # whose rows are in one place
    assert kept == [parameter.data_ptr() for parameter in model.parameters()]


def test_broadcast_parameters(world: World, runner: str) -> None:
    """Parameters and buffers equal those of the source, in the existing tensors."""
    world.run(from_source, runner=runner)


async def alongside(me: Rank) -> None:
    models = {"a": network(), "b": network()}

    async def train(name: str) -> None:
        model = models[name]
        # The ranks make the reducers in different orders, and cannot wait for each other there.
        with ac.overlap_gradients(model, lane=name, init_sync=False, **SMALL) as gradients:
            for step in range(5):
                model.zero_grad()
                loss = loss_of(model, batch(me.rank, step)) * ord(name)
                await asyncio.to_thread(loss.backward)
                await gradients

        def backward(twin: nn.Module, rank: int) -> None:
            (loss_of(twin, batch(rank, 4)) * ord(name)).backward()

        check_gradients(model, averages(model, me.size, backward))

    names = ["a", "b"]
    async with anyio.create_task_group() as tasks:
        for name in names if me.rank % 2 else reversed(names):
            tasks.start_soon(train, name)


def test_two_models_train_side_by_side(pair: World) -> None:
    """Each model trains on its own lane; each rank starts them in a different order."""
    pair.run(alongside)


def test_a_gradient_that_was_written_to_is_named():
    """The error has the model's name for it; parameters given without a model have only their shapes."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    for given, name in (
        (model, "the parameter '0.weight' of shape [1, 3]"),
        (model.parameters(), "a parameter"),
    ):
        with ac.overlap_gradients(given, op="avg", init_sync=False) as gradients:
            model(torch.ones(2, 3)).sum().backward()
            model[0].weight.grad.mul_(0.5)
            with pytest.raises(ac.InvalidArgumentError) as refused:
                gradients.wait()
        assert f"the .grad of {name}" in str(refused.value)
        assert "await first, then clip" in str(refused.value)
        model.zero_grad()


async def tied_twice(me: Rank) -> None:
    model = alike(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    model[2].weight = model[0].weight
    listed = [*model[0].parameters(), *model[2].parameters()]

    def backward(twin: nn.Module, rank: int) -> None:
        twin(rows(rank, 0)).square().mean().backward()

    want = averages(model, me.size, backward)
    with ac.overlap_gradients(listed, **SMALL) as gradients:
        backward(model, me.rank)
        await gradients
        check_gradients(model, want)
    await ac.overlap.average_parameters(listed, every=1)


def test_a_parameter_that_is_listed_twice(pair: World) -> None:
    """This happens in parameter lists of tied layers: the parameter counts once."""
    pair.run(tied_twice)


@pytest.mark.parametrize("outputs", [2, 5])
def test_a_parameter_of_another_shape_than_before(outputs: int) -> None:
    """It is refused. Regression: the bucket was resized, and a part of the gradient was reduced silently."""
    model = nn.Linear(6, 3)
    with ac.overlap_gradients(model, **SMALL) as gradients:
        model(rows(0, 0)).sum().backward()
        gradients.wait()
        model.zero_grad()
        model.weight.data, model.bias.data = torch.ones(outputs, 6), torch.ones(outputs)
        with raising(ac.InvalidArgumentError, "'bias'", "was of shape [3] when its bucket was made"):
            model(rows(0, 0)).sum().backward()


async def zeroed_too_early(me: Rank, dtype: torch.dtype | None) -> None:
    model = network().double()
    with ac.overlap_gradients(model, reduce_dtype=dtype, **SMALL) as gradients:
        loss_of(model, batch(me.rank, 0).double()).backward()
        here = me.rank == 0
        if here:
            model.zero_grad()
        with raising(ac.InvalidArgumentError, "was set to None") if here else contextlib.nullcontext():
            await gradients
        model.zero_grad()
        loss_of(model, batch(me.rank, 1).double()).backward()
        await gradients


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_that_are_zeroed_before_the_await(pair: World, dtype: torch.dtype | None) -> None:
    """This is refused. Regression: this rank's step left them out, and the ranks diverged silently."""
    pair.run(zeroed_too_early, dtype)

"""Training in which ranks behave differently: the result of one process, or an error that says what to do.

In simulated worlds, in three orders each, in float64: ranks without data, waits that are cut short on some
ranks and repeated, gradients that are changed by hand, layers that some ranks leave out of one of two models.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import asynccoll as ac
from asynccoll.testing import PCT, RandomWalk, simulate
from ranks import raising
from test_training_simulated import SMALL, adamw, batch, flat, loss, mean_loss, model_of

Rank = Callable[[int], Awaitable[Any]]


def run(rank_does: Rank, size: int) -> dict[int, Any]:
    """Return what each rank returns, in the last of several orders."""
    for seed in range(3):
        loop, schedule = ("asyncio", "trio")[seed % 2], (RandomWalk(), PCT())[seed // 2]
        report = simulate(rank_does, world_size=size, seed=seed, loop=loop, schedule=schedule)
        report.check()
    return report.results


def as_alone(rank_does: Rank, size: int, want: Tensor) -> None:
    for rank, got in run(rank_does, size).items():
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12, msg=f"rank {rank}")


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def one_process(
    size: int,
    steps: Iterable[int] = range(3),
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    max_norm: float = math.inf,
    model: nn.Module | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Run the usual loop over the data of all ranks."""
    model = model_of() if model is None else model
    optimizer = make(model)
    for step in steps:
        optimizer.zero_grad()
        mean_loss(model, size, step).backward()
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model, optimizer


async def cut_short(wait: Callable[[], Awaitable[Any]], here: bool) -> Any:
    """Wait; if ``here``, cancel the wait immediately and then repeat it."""
    if here:
        with anyio.move_on_after(0) as limit:
            return await wait()
        assert limit.cancelled_caught
    return await wait()


SIZES = pytest.mark.parametrize("size", [2, 3])

# ---------------------------------------------------------------- ranks without data


def sometimes(rank: int, size: int, step: int, part: int) -> bool:
    """Whether a rank has data for this part of a step; rank 0 always has."""
    return not rank or random.Random(f"{rank} {size} {step} {part}").random() < 0.5


def helped(kind: str, model: nn.Module) -> Any:
    if kind == "shard_optimizer":
        return ac.overlap.shard_optimizer(model, sgd(model), **SMALL)
    return ac.async_optim(sgd(model), **SMALL)


def sharded(
    rank: int, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd
) -> tuple[nn.Module, ac.overlap.ShardedOptimizer]:
    model = model_of(rank)
    return model, ac.overlap.shard_optimizer(model, make(model), **SMALL)


async def finished(optimizer: Any) -> None:
    if isinstance(optimizer, ac.overlap.ShardedOptimizer):
        await optimizer.aclose()
    else:
        optimizer.close()


@SIZES
@pytest.mark.parametrize("zeroes", [True, False], ids=["to None", "to zeros"])
@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_a_rank_without_data_after_an_extra_reduction(kind: str, zeroes: bool, size: int) -> None:
    """It has nothing to add, but takes part all the same because another rank has data."""
    parts = 3

    def alone() -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(parts):
                for rank in range(size):
                    if sometimes(rank, size, step, part):
                        (loss(model, rank, 10 * step + part) / size).backward()
            if step != 1:
                optimizer.step()
        return flat(model)

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        optimizer = helped(kind, model)
        for step in range(4):
            optimizer.zero_grad(set_to_none=zeroes)
            for part in range(parts):
                if sometimes(rank, size, step, part):
                    loss(model, rank, 10 * step + part).backward()
                if part < parts - 1:
                    await optimizer.reduced()
            if step == 1:  # skipped, although everything is reduced
                await optimizer.reduced()
                continue
            await optimizer.step()
        await finished(optimizer)
        return flat(model)

    as_alone(rank_does, size, alone())


@SIZES
@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_a_step_that_finds_everything_reduced(kind: str, size: int) -> None:
    """It reduces nothing again."""

    async def rank_does(rank: int) -> None:
        model = model_of(rank)
        optimizer = helped(kind, model)
        loss(model, rank, 0).backward()
        await optimizer.reduced()
        with ac.trace.recording() as timeline:
            await optimizer.reduced()
            await optimizer.step()
            await finished(optimizer)
        sent = [span.name for span in timeline.spans if span.is_operation]
        assert "reduce_scatter" not in sent
        assert kind != "async_optim" or len(sent) <= 4, sent

    run(rank_does, size)


@SIZES
@pytest.mark.parametrize(("here", "elsewhere"), [(2, 1), (1, 0)])
def test_a_reduction_of_one_rank_alone(here: int, elsewhere: int, size: int) -> None:
    """It once asked for more, on its own lane, when the others had stepped: each waited for the other."""

    async def rank_does(rank: int) -> bool:
        model = model_of(rank)
        optimizer = helped("async_optim", model)
        with raising(ac.CollectiveMismatchError, "`await optimizer.reduced()` equally often on every rank"):
            for step in range(2):
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                for _ in range(elsewhere if rank else here):
                    await optimizer.reduced()
                await optimizer.step()
        assert step == (rank > 0)  # rank 0 has not reached the second step
        for step in range(2):  # they continue together
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await optimizer.reduced()
            grads = torch.cat([x.grad.reshape(-1) for x in model.parameters() if x.grad is not None])
            average = await ac.all_reduce(grads, op="avg")
            torch.testing.assert_close(grads, average)
            await optimizer.step()
        optimizer.close()
        return True

    run(rank_does, size)


# ---------------------------------------------------------------- waits that are cut short


@SIZES
@pytest.mark.parametrize("who", ["last", "first", "all"])
def test_waits_of_a_sharded_optimizer_that_are_done_again(who: str, size: int) -> None:
    """Clipping, the step and the state of the whole optimizer each resume where they were cut short."""

    async def rank_does(rank: int) -> tuple[Tensor, Any]:
        here = {"last": rank == size - 1, "first": rank == 0, "all": True}[who]
        model, optimizer = sharded(rank, adamw)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await cut_short(lambda: optimizer.clip_grad_norm_(0.05), here)
            await cut_short(optimizer.step, here)
            if step % 2:
                state = (await cut_short(optimizer.full_state_dict, here))["state"]
        await optimizer.aclose()
        return flat(model), state

    model, optimizer = one_process(size, range(4), make=adamw, max_norm=0.05)
    want, states = flat(model), optimizer.state_dict()["state"]
    for got, state in run(rank_does, size).values():
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12)
        for number, of_one in states.items():
            for name, value in of_one.items():
                torch.testing.assert_close(state[number][name], value, rtol=0.0, atol=1e-12)


@SIZES
def test_a_wait_that_is_cut_short_and_not_done_again(size: int) -> None:
    """The next wait completes it, as on the ranks where it was not cut short."""

    async def rank_does(rank: int) -> Tensor:
        model, optimizer = sharded(rank)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            with anyio.move_on_after(0 if rank == step % size else 100):
                await optimizer.clip_grad_norm_(0.05)
            await optimizer.step()
            with anyio.move_on_after(0 if rank == (step + 1) % size else 100):
                await optimizer.full_state_dict()
        await optimizer.aclose()
        return flat(model)

    as_alone(rank_does, size, flat(one_process(size, max_norm=0.05)[0]))


@SIZES
def test_waits_of_sharded_layers_that_are_done_again(size: int) -> None:
    """Clipping, gathering the whole parameters, and gathering the state of their optimizer are repeated."""

    def alone() -> tuple[dict[str, Tensor], Any]:
        layers = blocks()
        optimizer = adamw(layers)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(size):
                (through(layers, rank, step) / size).backward()
            nn.utils.clip_grad_norm_(layers.parameters(), 0.05)
            optimizer.step()
        names = [name for name, _ in layers.named_parameters()]
        return dict(layers.state_dict()), dict(
            zip(names, optimizer.state_dict()["state"].values(), strict=True)
        )

    async def rank_does(rank: int) -> tuple[dict[str, Tensor], Any]:
        layers = ac.overlap.shard_layers(blocks())
        optimizer = adamw(layers)
        for step in range(3):
            here = rank == step % size
            optimizer.zero_grad()
            (through(layers, rank, step) / size).backward()
            await cut_short(lambda: layers.clip_grad_norm_(0.05), here)
            optimizer.step()
            whole = await cut_short(layers.full_state_dict, here)
            state = await cut_short(lambda: layers.full_optimizer_state(optimizer), here)
        return whole, state["state"]

    want, states = alone()
    for whole, state in run(rank_does, size).values():
        torch.testing.assert_close(whole, want, rtol=0.0, atol=1e-12)
        torch.testing.assert_close(state, states, rtol=0.0, atol=1e-12)


@SIZES
@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_steps_that_are_cut_short(kind: str, size: int) -> None:
    """A repeated step does not call the closure again; without the repetition, the next step is a new one."""

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        optimizer = helped(kind, model)
        calls = []
        for step in range(4):
            here = rank == step % size

            def closure(step: int = step) -> Tensor:
                calls.append(step)
                optimizer.zero_grad()
                lost = loss(model, rank, step)
                lost.backward()
                return lost

            if step % 2:
                assert (await cut_short(lambda: optimizer.step(closure), here)).numel() == 1
                continue
            closure()
            await optimizer.reduced()
            with anyio.move_on_after(0 if here else 100):
                await optimizer.step()  # where the ranks ask each other
        assert calls == [0, 1, 2, 3]
        await cut_short(optimizer.reduced, False)  # completes the last step
        await finished(optimizer)
        return flat(model)

    as_alone(rank_does, size, flat(one_process(size, range(4))[0]))


@SIZES
@pytest.mark.parametrize("has", ["nothing", "accumulated"])
def test_an_await_without_a_backward_that_is_cut_short(has: str, size: int) -> None:
    """A step or a backward before the await would use, or add to, gradients that are being sent."""

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        optimizer = sgd(model)
        with ac.overlap_gradients(model, **SMALL) as gradients:
            for step in range(2):
                optimizer.zero_grad()
                if rank or has == "accumulated":
                    with gradients.no_sync() if not rank else contextlib.nullcontext():
                        loss(model, rank, step).backward()
                if not rank:
                    with anyio.move_on_after(0):
                        await gradients
                    early = loss(model, rank, 7).backward if step else optimizer.step
                    with raising(ac.InvalidArgumentError, "await gradients", "(again, if that wait was cut"):
                        early()
                await gradients
                if not step:
                    optimizer.step()
        return flat(model)

    model = model_of()
    for rank in range(has == "nothing", size):
        (loss(model, rank, 0) / size).backward()
    sgd(model).step()
    as_alone(rank_does, size, flat(model))


@SIZES
@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_nothing_changes_gradients_before_a_step_that_was_cut_short(kind: str, size: int) -> None:
    """The step was skipped, or made with other gradients than on the ranks that were not cut short."""

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        optimizer = helped(kind, model)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await optimizer.reduced()
            for gives_up in (rank == step % size, False):
                with anyio.move_on_after(0 if gives_up else 100) as limit:
                    await optimizer.step()  # where the ranks ask each other
                if not limit.cancelled_caught:
                    break
                for early in (optimizer.zero_grad, loss(model, rank, 7).backward, optimizer.wrapped.step):
                    with raising(ac.InvalidArgumentError, "Await step() again first"):
                        early()
        await finished(optimizer)
        return flat(model)

    as_alone(rank_does, size, flat(one_process(size)[0]))


@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_nothing_is_refused_once_an_optimizer_whose_step_was_cut_short_is_left(kind: str) -> None:
    async def rank_does(rank: int) -> None:
        model = model_of()
        optimizer = helped(kind, model)
        loss(model, rank, 0).backward()
        await optimizer.reduced()
        with anyio.move_on_after(0):
            await optimizer.step()
        await optimizer.__aexit__(ZeroDivisionError)
        optimizer.zero_grad()

    run(rank_does, 2)


def test_the_wrapped_optimizer_steps_only_with_what_was_reduced() -> None:
    """It used to take the last step's gradients, or gradients that were still being received."""

    async def rank_does(rank: int) -> Tensor:
        model, optimizer = sharded(rank)
        for step in range(3):
            optimizer.zero_grad()
            for gives_up in (False, True):
                if gives_up:
                    loss(model, rank, step).backward()
                    with anyio.move_on_after(0):
                        await optimizer.reduced()
                with raising(ac.InvalidArgumentError, "before clipping `await optimizer.reduced()`"):
                    optimizer.wrapped.step()
            await optimizer.reduced()
            optimizer.wrapped.step()
            optimizer.gather()
        await optimizer.aclose()
        return flat(model)

    as_alone(rank_does, 2, flat(one_process(2)[0]))


def test_parts_of_layers_do_not_step_before_they_are_clipped() -> None:
    async def rank_does(rank: int) -> None:
        layers = ac.overlap.shard_layers(blocks())
        optimizer = sgd(layers)
        through(layers, rank, 0).backward()
        with anyio.move_on_after(0):
            await layers.clip_grad_norm_(0.05)
        with raising(ac.InvalidArgumentError, "step of the optimizer", "Await clip_grad_norm_() again"):
            optimizer.step()
        sgd(nn.Linear(1, 1)).step()  # is unrelated to the layers
        await layers.clip_grad_norm_(0.05)
        optimizer.step()

    run(rank_does, 2)


def test_two_tasks_in_one_optimizer_are_told() -> None:
    """Their collectives would interleave differently on each rank."""

    async def rank_does(rank: int) -> None:
        model, optimizer = sharded(rank, adamw)
        loss(model, rank, 0).backward()
        await optimizer.step()
        told = []

        async def save() -> None:
            try:
                await optimizer.full_state_dict()
            except ac.InvalidArgumentError as error:
                told.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save)
            tasks.start_soon(save)
        assert len(told) == 1, told
        assert "one task at a time" in told[0]
        await optimizer.aclose()

    run(rank_does, 2)


def test_nothing_is_skipped_in_the_middle_of_a_wait() -> None:
    async def rank_does(rank: int) -> None:
        model, optimizer = sharded(rank)
        loss(model, rank, 0).backward()
        await optimizer.reduced()
        if rank == 1:  # it cannot be done yet: the other rank has not begun it
            with anyio.move_on_after(0):
                await optimizer.clip_grad_norm_(0.1)
            with raising(ac.InvalidArgumentError, "clip_grad_norm_()", "again first"):
                optimizer.skip()
        await ac.barrier(lane="cut short")
        await optimizer.clip_grad_norm_(0.1)
        optimizer.skip()
        await optimizer.aclose()

    run(rank_does, 2)


# ---------------------------------------------------------------- gradients that are changed by hand


@SIZES
@pytest.mark.parametrize("how", ["scaled", "turned", "clipped by torch", "written"])
@pytest.mark.parametrize("then", ["step", "backward"])
def test_gradients_written_to_after_the_reduction_are_told(how: str, then: str, size: int) -> None:
    """A sharded optimizer keeps what it has reduced elsewhere, and used to drop it after such a write."""

    def touch(model: nn.Module) -> None:
        if how == "clipped by torch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()
            if how == "scaled":
                parameter.grad.mul_(0.5)
            elif how == "turned":
                parameter.grad.neg_()
            elif how == "written":
                parameter.grad.add_(0.1)

    async def rank_does(rank: int) -> Tensor:
        model, optimizer = sharded(rank)
        loss(model, rank, 5).backward()
        await optimizer.reduced()
        touch(model)
        with raising(ac.InvalidArgumentError, "clip_grad_norm_"):
            if then == "backward":
                loss(model, rank, 6).backward()
            else:
                await optimizer.step()
        if then == "backward":
            optimizer.zero_grad()
            await optimizer.reduced()  # so that the ranks stay in step
        for step in range(2):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await optimizer.step()
        await optimizer.aclose()
        return flat(model)

    as_alone(rank_does, size, flat(one_process(size, range(2))[0]))


@SIZES
def test_gradients_changed_in_place_where_nothing_has_gathered(size: int) -> None:
    """Each micro-batch is clipped by itself, under no_sync."""

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def alone() -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(size):
                (loss(model, rank, step) / size).backward()
            scale(model)
            for rank in range(size):
                (loss(model, rank, 10 + step) / size).backward()
            optimizer.step()
        return flat(model)

    async def rank_does(rank: int) -> Tensor:
        model, optimizer = sharded(rank)
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss(model, rank, step).backward()
            scale(model)
            loss(model, rank, 10 + step).backward()
            await optimizer.step()
        await optimizer.aclose()
        return flat(model)

    as_alone(rank_does, size, alone())


@SIZES
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("how", ["in place", "detached", "replaced"])
def test_gradients_replaced_after_the_reduction(how: str, op: str, size: int) -> None:
    """With op="sum" a new tensor may or may not be a sum already: it is refused."""

    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            if how == "in place":
                parameter.grad.mul_(0.5)
            elif how == "detached":
                parameter.grad = parameter.grad.mul_(0.5).detach()
            else:
                parameter.grad = parameter.grad * 0.5

    def alone() -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            mean_loss(model, size, step).backward()
            change(model)
            mean_loss(model, size, 10 + step).backward()
            optimizer.step()
        return flat(model)

    refused = op == "sum" and how == "replaced"

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        optimizer, parts = sgd(model), size if op == "sum" else 1
        gradients = ac.overlap_gradients(model, op=op, **SMALL)
        for step in range(3):
            optimizer.zero_grad()
            (loss(model, rank, step) / parts).backward()
            await gradients
            change(model)
            if refused:
                with raising(ac.InvalidArgumentError, "op='sum'", "in place"):
                    loss(model, rank, 10 + step).backward()
                optimizer.zero_grad()
                await gradients  # sends the gradients there are
                (loss(model, rank, step) / parts).backward()
                await gradients
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            (loss(model, rank, 10 + step) / parts).backward()
            await gradients
            optimizer.step()
        gradients.close()
        return flat(model)

    as_alone(rank_does, size, alone())


@pytest.mark.parametrize("kind", ["overlap_gradients", "async_optim", "shard_optimizer"])
@pytest.mark.parametrize("how", ["clipped", "replaced"])
def test_gradients_changed_before_the_await_are_told(how: str, kind: str) -> None:
    """Clipping gradients while they are being sent would make ranks differ; the next step is unaffected."""

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        plain = sgd(model)
        gradients = (
            ac.overlap_gradients(model, **SMALL) if kind == "overlap_gradients" else helped(kind, model)
        )
        reduced = gradients if kind == "overlap_gradients" else None
        for step in range(2):
            plain.zero_grad()
            loss(model, rank, step).backward()
            if step == 0:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    if how == "clipped":
                        parameter.grad.clamp_(-0.01, 0.01)
                    else:
                        parameter.grad = parameter.grad * 0.5
                with raising(ac.InvalidArgumentError, "between backward and the await"):
                    await (reduced if reduced is not None else gradients.reduced())
                continue
            await (reduced if reduced is not None else gradients.reduced())
            plain.step() if reduced is not None else await gradients.step()
        if reduced is None:
            await finished(gradients)
        return flat(model)

    as_alone(rank_does, 2, flat(one_process(2, [1])[0]))


# ---------------------------------------------------------------- parameters that share memory


class Aliased(nn.Module):
    """Two parameters that share memory, tied through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight.data = self.a.weight.data


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "there and back": lambda model: model.float().double(),
    "for good": lambda model: model.float(),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
}
CHANGED, REPLACED = "changed between backward and the await", "'0.weight' of the model was replaced"
CONVERTED = [
    ("there and back", "after the step", "", "has other memory than when"),
    ("there and back", "before backward", "", "has other memory than when"),
    ("there and back", "before the await", CHANGED, "has other memory than when"),
    ("for good", "before backward", "float64 when its bucket was made", "float64 when its bucket was made"),
    ("assigned", "after the step", REPLACED, REPLACED),
]


@pytest.mark.parametrize(("how", "when", "told", "told_sharded"), CONVERTED)
@pytest.mark.parametrize("shares_out", [False, True])
def test_models_that_are_converted(
    how: str, when: str, told: str, told_sharded: str, shares_out: bool
) -> None:
    """``.grad`` then has new memory, and the old memory must not be sent."""
    told = told_sharded if shares_out else told

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        plain = sgd(model)
        made: Any = ac.overlap.shard_optimizer(model, plain) if shares_out else ac.overlap_gradients(model)
        with raising(ac.InvalidArgumentError, told) if told else contextlib.nullcontext():
            for step in range(3):
                model.zero_grad()
                lost = loss(model, rank, step)
                if (step, when) == (1, "before backward"):
                    CONVERSIONS[how](model)
                lost.backward()
                if (step, when) == (1, "before the await"):
                    CONVERSIONS[how](model)
                await (made.step() if shares_out else made)
                if not shares_out:
                    plain.step()
                if (step, when) == (1, "after the step"):
                    CONVERSIONS[how](model)
        return flat(model)

    results = run(rank_does, 2)
    if not told:
        for got in results.values():
            torch.testing.assert_close(got, flat(one_process(2)[0]), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gradients", "shard_optimizer"])
def test_parameters_that_are_tied_later_are_not_told_as_replaced(kind: str) -> None:
    """They are the model's and are trained, even if another parameter is unfrozen at the same time."""

    def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
        if kind == "gradients":
            model[3].requires_grad_(False)
        return model, sgd(model)

    def tie(model: nn.Sequential) -> None:
        model[2].weight = model[0].weight
        if kind == "gradients":
            model[3].requires_grad_(True)

    async def rank_does(rank: int) -> Tensor:
        model, optimizer = made()
        helper: Any = (
            ac.overlap_gradients(model, **SMALL)
            if kind == "gradients"
            else ac.overlap.shard_optimizer(model, optimizer, **SMALL)
        )
        for step in range(3):
            model.zero_grad()
            loss(model, rank, step).backward()
            if kind == "gradients":
                await helper
                optimizer.step()
            else:
                await helper.step()
                await helper.gathered()
            if step == 0:
                tie(model)
        await finished(helper)
        return flat(model)

    model, optimizer = made()
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(model, 2, step).backward()
        optimizer.step()
        if step == 0:
            tie(model)
    as_alone(rank_does, 2, flat(model))


def test_parameters_that_share_memory_are_refused() -> None:
    """Helpers that give parameters other memory would untie them; others would change them twice."""

    async def rank_does(rank: int) -> None:
        model = Aliased()
        with raising(ac.InvalidArgumentError, "'a.weight'", "'b.weight'", "share memory"):
            ac.overlap.shard_optimizer(model, sgd(model))
        with raising(ac.InvalidArgumentError, "'0.weight'", "'1.weight'", "share memory"):
            ac.overlap.shard_layers([model.a, model.b])
        with raising(ac.InvalidArgumentError, "share memory"):
            ac.overlap.average_parameters(model, every=1)
        ac.overlap_gradients(model).close()

    run(rank_does, 2)


class Listed(nn.Module):
    """Parameters in a ParameterList, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((6,), 0.1 * (1 + index)).double() for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(x * weight).sum(1) for weight in self.weights], dim=1)


@SIZES
def test_parameters_in_a_list(size: int) -> None:
    """The module that contains the list waits for them."""

    async def rank_does(rank: int) -> Tensor:
        model = Listed()
        optimizer = ac.overlap.shard_optimizer(model, sgd(model), **SMALL)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await optimizer.step()
        await optimizer.aclose()
        return flat(model)

    as_alone(rank_does, size, flat(one_process(size, model=Listed())[0]))


def test_parameters_that_are_frozen_later_or_have_no_shape() -> None:
    """Momentum would move a frozen parameter, and a lazy module has nothing to shard."""

    async def rank_does(rank: int) -> None:
        model = model_of()
        optimizer = ac.overlap.shard_optimizer(model, sgd(model), **SMALL)
        model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        loss(model, rank, 0).backward()
        with raising(ac.InvalidArgumentError, "'0.weight'", "was trained", "freeze it before"):
            await optimizer.step()
        lazy = nn.Sequential(nn.LazyLinear(3))
        for helper in (
            lambda: ac.overlap_gradients(lazy),
            lambda: ac.overlap.shard_optimizer(lazy, sgd(lazy)),
        ):
            with raising(ac.InvalidArgumentError, "lazy", "run one forward"):
                helper()

    run(rank_does, 2)


def test_the_state_of_frozen_parameters_is_kept() -> None:
    """It is kept in the state of the whole optimizer, as torch's own optimizer keeps it."""

    async def rank_does(rank: int) -> tuple[Any, Any]:
        model = model_of()
        optimizer = adamw(model)
        mean_loss(model, 2, 0).backward()
        optimizer.step()
        model[0].requires_grad_(False)  # type: ignore[union-attr]
        optimizer.zero_grad()
        want = copy.deepcopy(optimizer.state_dict()["state"])
        async with ac.overlap.shard_optimizer(model, optimizer, **SMALL) as sharded:
            return (await sharded.full_state_dict())["state"], want

    for got, want in run(rank_does, 2).values():
        torch.testing.assert_close(got, want)


# ---------------------------------------------------------------- layers


def blocks(seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList([*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)]).double()


@SIZES
def test_layers_that_are_kept_and_called_later(size: int) -> None:
    async def rank_does(rank: int) -> Tensor:
        layers = ac.overlap.shard_layers(blocks())
        optimizer = sgd(layers)
        for step in range(3):
            optimizer.zero_grad()
            (through(list(layers), rank, step) / size).backward()
            optimizer.step()
        return joined(await layers.full_state_dict())

    layers = blocks()
    optimizer = sgd(layers)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            (through(layers, rank, step) / size).backward()
        optimizer.step()
    as_alone(rank_does, size, flat(layers))


def joined(*wholes: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for whole in wholes for x in whole.values()])


def through(layers: Any, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    for layer in layers:
        x = layer(x)
    return mse_loss(x, y)


def dropping(layers: Any, x: Tensor, seed: str) -> Tensor:
    drawn = random.Random(seed)
    for index, layer in enumerate(layers):
        called = index == 0 or drawn.random() > 0.5
        x = torch.tanh(layer(x)) if called else x
    return x


@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
@SIZES
def test_two_sets_of_layers_that_ranks_leave_out(reshard: bool, size: int) -> None:
    """The gradients of an encoder and a decoder of equal shapes, without lanes, are not mixed up."""

    def layers_of(seed: int) -> nn.ModuleList:
        torch.manual_seed(seed)
        return nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]).double()

    def one(encoder: Any, decoder: Any, rank: int, step: int) -> Tensor:
        x, y = batch(rank, step)
        x = dropping(encoder, x * x.new_ones(1, requires_grad=True), f"encoder {rank} {step}")
        return mse_loss(dropping(decoder, x, f"decoder {rank} {step}")[:, :3], y)

    def alone() -> Tensor:
        models = layers_of(1), layers_of(2)
        optimizers = [torch.optim.SGD(layers.parameters(), lr=0.1) for layers in models]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in range(size):
                (one(*models, rank, step) / size).backward()
            for optimizer in optimizers:
                optimizer.step()
        return flat(*models)

    async def rank_does(rank: int) -> Tensor:
        models = [ac.overlap.shard_layers(layers_of(seed), reshard_after_forward=reshard) for seed in (1, 2)]
        optimizers = [torch.optim.SGD(layers.parameters(), lr=0.1) for layers in models]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (one(*models, rank, step) / size).backward()
            for optimizer in optimizers:
                optimizer.step()
        return joined(*[await layers.full_state_dict() for layers in models])

    as_alone(rank_does, size, alone())


@SIZES
@pytest.mark.parametrize("data", ["no layer", "an empty batch", "no_grad"])
def test_a_rank_that_calls_no_layer(data: str, size: int) -> None:
    """Its error comes at the end of its loop, the others' when it has left; an empty batch takes part."""

    def alone() -> Tensor:
        layers = blocks()
        optimizer = sgd(layers)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(size):
                if not idle(rank, step):
                    (through(layers, rank, step) / size).backward()
            optimizer.step()
        return flat(layers)

    def idle(rank: int, step: int) -> bool:
        return step == 1 and rank == size - 1

    async def rank_does(rank: int) -> Tensor:
        layers = ac.overlap.shard_layers(blocks())
        optimizer = sgd(layers)
        for step in range(3):
            optimizer.zero_grad()
            if idle(rank, step) and data == "no layer":
                with raising(ac.InvalidArgumentError, "no layer of the loop", "an empty batch", "no_grad()"):
                    async for _ in layers:
                        pass
                return flat(layers)
            if data == "no_grad":  # an evaluation for which some have no data
                with torch.no_grad():
                    for layer in layers:
                        _ = layer if rank else layer.parameters
            if idle(rank, step):
                x = batch(rank, step)[0][:0]
                for layer in layers:
                    x = layer(x)
                x.sum().backward()
            elif data == "no layer" and step == 1:
                with raising(ac.PeerLostError, f"rank {size - 1}"):
                    through(layers, rank, step).backward()
                return flat(layers)
            else:
                (through(layers, rank, step) / size).backward()
            optimizer.step()
        return joined(await layers.full_state_dict())

    if data == "no layer":
        run(rank_does, size)
    else:
        as_alone(rank_does, size, alone())


@SIZES
@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
@pytest.mark.parametrize("then", ["loops again", "reduces", "raises"])
def test_a_loss_without_the_layers(then: str, reshard: bool, size: int) -> None:
    """The last rank calls them, but its backward reaches none: all are told so, wherever they wait."""

    def alone() -> Tensor:
        layers = blocks()
        optimizer = sgd(layers)
        for step in (0, 2):
            optimizer.zero_grad()
            for rank in range(size):
                (through(layers, rank, step) / size).backward()
            optimizer.step()
        return flat(layers)

    def told(rank: int) -> Any:
        says = [f"backward on rank {size - 1} has reached no layer of its loop 2", "times 0"]
        return raising(ac.PeerRefusedError, *says)

    async def rank_does(rank: int) -> Tensor:
        layers = ac.overlap.shard_layers(blocks(), reshard_after_forward=reshard)
        optimizer = sgd(layers)
        odd = rank == size - 1
        for step in range(3):
            optimizer.zero_grad()
            loss = through(layers, rank, step) / size
            if step != 1:
                loss.backward()
            elif not odd:
                with told(rank):
                    loss.backward()
            elif then == "raises":
                loss.register_hook(lambda _: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    loss.backward()
            if step == 1 and then == "loops again":
                if odd:
                    with told(rank):  # ``loss`` still exists
                        through(layers, rank, 2)
                return flat(layers)
            if step == 1:
                del loss
                assert not await ac.all_reduce(not odd, op="and")
                continue
            optimizer.step()
        return joined(await layers.full_state_dict())

    if then == "loops again":
        run(rank_does, size)
    else:
        as_alone(rank_does, size, alone())


def test_layers_that_have_a_lane_keep_it() -> None:
    """Others on it are refused while these live; sets without a lane are told apart when gathered."""

    async def rank_does(rank: int) -> None:
        first = ac.overlap.shard_layers(blocks(), lane="mine")
        with raising(ac.InvalidArgumentError, "'mine'", "another lane"):
            ac.overlap.shard_layers(blocks(), lane="mine")
        through(first, rank, 0).backward()
        del first
        ac.overlap.shard_layers(blocks(), lane="mine")
        two = [ac.overlap.shard_layers(blocks()) for _ in range(2)]
        with raising(ac.CollectiveMismatchError, "layer 0 of shard_layers number 1", "number 2"):
            through(two[rank], rank, 0)

    run(rank_does, 2)


class Partly(nn.Module):
    """A model whose middle is sharded."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.head = nn.Linear(3, 3).double()
        self.blocks = ac.overlap.shard_layers(blocks())


def test_parts_are_refused_by_what_takes_whole_models() -> None:
    """Each rank has other parts: rank 0's were silently given to all, or all of them averaged."""
    takers: dict[str, Callable[[nn.Module], Any]] = {
        "overlap_gradients": ac.overlap_gradients,
        "overlap_gradients(init_sync=False)": lambda model: ac.overlap_gradients(model, init_sync=False),
        "async_optim": lambda model: ac.async_optim(sgd(model)),
        "shard_optimizer": lambda model: ac.overlap.shard_optimizer(model, sgd(model)),
        "shard_optimizer of the rest": lambda model: ac.overlap.shard_optimizer(model, sgd(model.head)),
        "average_parameters": lambda model: ac.overlap.average_parameters(model, every=1),
        "broadcast_parameters": ac.overlap.broadcast_parameters,
        "check_parameters": lambda model: ac.overlap.check_parameters(model).wait(),
        "shard_layers": lambda model: ac.overlap.shard_layers([model]),
        "auto_model": ac.auto_model,
    }

    async def rank_does(rank: int) -> None:
        model = Partly(rank)
        before = flat(model)
        for name, take in takers.items():
            with raising(ac.InvalidArgumentError, "this rank's part", "pass only the other modules"):
                take(model)
            assert torch.equal(flat(model), before), name
        model.blocks.float()
        with raising(ac.InvalidArgumentError, "this rank's part"):
            ac.overlap_gradients(model)
        ac.overlap_gradients(model.head).close()

    run(rank_does, 2)


def test_layers_that_are_empty_are_refused() -> None:
    """Layers that are already sharded are refused, and so are parameters tied between two sets."""

    async def rank_does(rank: int) -> None:
        layers = blocks()
        first, tied = ac.overlap.shard_layers(layers), nn.Linear(6, 6).double()
        tied.weight = layers[1].weight  # type: ignore[assignment]
        for again in (layers, [tied]):
            with raising(ac.InvalidArgumentError, "is empty", "one module"):
                ac.overlap.shard_layers(again)
        with raising(ac.InvalidArgumentError, "is empty"):
            ac.overlap_gradients(layers)
        through(first, rank, 0).backward()

    run(rank_does, 2)


def filled_up(x: Tensor, multiple: int) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % multiple)])


@SIZES
def test_gradients_that_are_returned(size: int) -> None:
    """torch.autograd.grad returns this rank's parts of the sum, and nothing is added to .grad."""

    async def rank_does(rank: int) -> None:
        layers, twin = ac.overlap.shard_layers(blocks()), blocks()
        found = torch.autograd.grad(through(layers, rank, 0) / size, list(layers.parameters()))
        assert all(part.grad is None for part in layers.parameters())
        total = sum((through(twin, other, 0) / size for other in range(size)), torch.zeros(()))
        grads = iter(torch.autograd.grad(total, list(twin.parameters())))
        for part in found:
            # In flat memory each parameter begins at 16 bytes, two numbers of float64, and so does each part.
            whole = torch.cat([filled_up(next(grads).reshape(-1), 2) for _ in range(2)])
            padded = filled_up(whole, 2 * size)
            torch.testing.assert_close(part, padded.chunk(size)[rank], rtol=0.0, atol=1e-12)

    run(rank_does, size)


def test_gradients_that_are_returned_of_layers_left_out_are_told() -> None:
    async def rank_does(rank: int) -> None:
        layers = ac.overlap.shard_layers(nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]).double())
        x, _ = batch(rank, 0)
        for index, layer in enumerate(layers):
            x = x if index == 1 + rank else layer(x)
        with raising(ac.CollectiveMismatchError, "rank 0 reached layer 2", "rank 1 reached layer 1"):
            torch.autograd.grad(x.sum(), list(layers.parameters()), allow_unused=True)

    run(rank_does, 2)


# ---------------------------------------------------------------- copies, scalers, buffers, local steps


def test_copies_of_models() -> None:
    """Whole parameters can be copied and pickled; parameters in flight, and parts, are refused."""

    async def rank_does(rank: int) -> None:
        model, optimizer = sharded(rank)
        loss(model, rank, 0).backward()
        await optimizer.step()
        for attempt in (copy.deepcopy, pickle.dumps):
            with raising(ac.InvalidArgumentError, "gathered()"):
                attempt(model)
        await optimizer.gathered()
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        loss(model, rank, 1).backward()
        await optimizer.step()
        for one in copies:
            assert not torch.equal(flat(one), flat(model))
            one(batch(rank, 0)[0])  # and waits for nothing
        layers = ac.overlap.shard_layers(blocks())
        for attempt in (copy.deepcopy, pickle.dumps):
            with raising(ac.InvalidArgumentError, "full_state_dict()"):
                attempt(layers)
        await optimizer.aclose()

    run(rank_does, 2)


@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_a_scaler_is_handed_to_the_step(kind: str) -> None:
    """A scaler that called a step to be awaited never stepped; passed to step(), ranks skip together."""

    def scalers() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def alone() -> Tensor:
        model = model_of()
        optimizer, scaler = sgd(model), scalers()
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(mean_loss(model, 2, step) * (float("inf") if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(model)

    async def rank_does(rank: int) -> Tensor:
        model = model_of(rank)
        optimizer, scaler = helped(kind, model), scalers()
        for step in range(4):
            optimizer.zero_grad()
            blown = step == 1 and rank == 1
            scaler.scale(loss(model, rank, step) * (float("inf") if blown else 1)).backward()
            with raising(ac.InvalidArgumentError, "step(scaler=scaler)"):
                scaler.step(optimizer)
            await optimizer.step(scaler=scaler)
            scaler.update()
        scaler.scale(loss(model, rank, 9)).backward()
        scaler.unscale_(optimizer)
        with raising(ac.InvalidArgumentError, "unscale_(scaler)"):
            await optimizer.step(scaler=scaler)
        await optimizer.reduced()
        await finished(optimizer)
        return flat(model)

    as_alone(rank_does, 2, alone())


@pytest.mark.parametrize("kind", ["async_optim", "shard_optimizer"])
def test_buffers_of_optimizers(kind: str) -> None:
    """If only an optimizer is passed, so is the module that has the buffers."""

    async def rank_does(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
        if kind == "async_optim":
            with raising(ac.InvalidArgumentError, "broadcast_buffers=model"):
                ac.async_optim(sgd(model), broadcast_buffers=True)
            optimizer: Any = ac.async_optim(sgd(model), broadcast_buffers=model)
        else:
            optimizer = ac.overlap.shard_optimizer(model, sgd(model), broadcast_buffers=True)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)[0]).square().mean().backward()
            await optimizer.step()
        await finished(optimizer)
        return float(model[1].running_mean.sum())

    found = run(rank_does, 3)
    assert len(set(found.values())) == 1, found


def test_local_steps_that_ranks_await_unevenly_are_told() -> None:
    """Two rounds that began at different steps, or a round and the last average, were combined."""

    async def rank_does(rank: int) -> None:
        parameter = nn.Parameter(torch.full((3,), float(rank)).double())
        averaging = ac.overlap.average_parameters([parameter], every=2)
        with raising(ac.CollectiveMismatchError, "another step", "equally often"):
            for _ in range(3 if rank else 5):
                await averaging
            await averaging.finish()

    for seed in range(3):
        simulate(rank_does, world_size=3, seed=seed).check()

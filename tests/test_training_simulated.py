"""Training loops in simulated worlds, in several orders each: the parameters of one process with all data.

They run in float64, so that rounding is no excuse. Each loop combines features of real ones.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import asynccoll as ac
from asynccoll.testing import PCT, RandomWalk, simulate
from ranks import raising

Loop = Callable[[int], Any]


class Loops(NamedTuple):
    """What each rank does, and what one process does with the data of all."""

    rank: Loop
    alone: Callable[[], torch.Tensor]


SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 200}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=drawn).double(), torch.randn(4, 3, generator=drawn).double()


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def flat(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return mse_loss(model(x), y)


def mean_loss(model: nn.Module, size: int, step: int) -> torch.Tensor:
    return sum((loss(model, rank, step) for rank in range(size)), torch.tensor(0.0).double()) / size


def plain(
    size: int, steps: int = 4, before: Callable[[nn.Module, int], object] = lambda model, step: None
) -> torch.Tensor:
    """The usual loop, in one process."""
    model = model_of()
    optimizer = adamw(model)
    for step in range(steps):
        before(model, step)
        optimizer.zero_grad()
        mean_loss(model, size, step).backward()
        optimizer.step()
    return flat(model)


def freezing(size: int) -> Loops:
    """A layer is frozen for two steps."""

    def freeze(model: Any, step: int) -> None:
        model[0].requires_grad_(not 2 <= step < 4)

    async def rank_does(rank: int) -> torch.Tensor:
        model = model_of(rank)
        gradients, optimizer = ac.overlap_gradients(model, **SMALL), adamw(model)
        for step in range(6):
            freeze(model, step)
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await gradients
            optimizer.step()
        return flat(model)

    return Loops(rank_does, lambda: plain(size, 6, freeze))


def two_that_compete(size: int) -> Loops:
    """The generator's loss goes through the discriminator, whose own gradients from it are discarded."""

    def pair() -> tuple[nn.Module, nn.Module]:
        generator = model_of(1)
        return generator, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def losses(generator: nn.Module, judge: nn.Module, rank: int, step: int) -> tuple[Any, Any]:
        x, y = batch(rank, step)
        real = (judge(y) - 1).pow(2).mean() + judge(generator(x).detach()).pow(2).mean()
        return real, lambda: (judge(generator(x)) - 1).pow(2).mean()

    def alone() -> torch.Tensor:
        generator, judge = pair()
        ours, theirs = adamw(generator), adamw(judge)
        for step in range(4):
            both = [losses(generator, judge, rank, step) for rank in range(size)]
            theirs.zero_grad()
            (sum(one for one, _ in both) / size).backward()
            theirs.step()
            ours.zero_grad()
            (sum(one() for _, one in both) / size).backward()
            ours.step()
        return flat(generator, judge)

    async def rank_does(rank: int) -> torch.Tensor:
        generator, judge = pair()
        ours, theirs = adamw(generator), adamw(judge)
        of_generator = ac.overlap_gradients(generator, lane="generator", **SMALL)
        of_judge = ac.overlap_gradients(judge, lane="judge", bucket_bytes=100, first_bucket_bytes=50)
        for step in range(4):
            real, fooled = losses(generator, judge, rank, step)
            theirs.zero_grad()
            real.backward()
            await of_judge
            theirs.step()
            ours.zero_grad()
            with of_judge.no_sync():
                fooled().backward()
            await of_generator
            judge.zero_grad()
            ours.step()
        return flat(generator, judge)

    return Loops(rank_does, alone)


def hooks_of_the_user(size: int) -> Loops:
    """They are registered before ours on some ranks, and after ours on others."""

    def add(model: nn.Module) -> None:
        for index, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda gradient, index=index: gradient * (1 + index) * 0.5)

    async def rank_does(rank: int) -> torch.Tensor:
        model = model_of(rank)
        if rank % 2:
            add(model)
        gradients, optimizer = ac.overlap_gradients(model, **SMALL), adamw(model)
        if not rank % 2:
            add(model)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await gradients
            optimizer.step()
        return flat(model)

    return Loops(rank_does, lambda: plain(size, 4, lambda model, step: None if step else add(model)))


def accumulating_unevenly(size: int) -> Loops:
    """Each rank has a different number of batches in a step."""

    def batches(rank: int, step: int) -> list[int]:
        return [10 * step + number for number in range(1 + (rank + step) % 3)]

    def alone() -> torch.Tensor:
        model = model_of()
        optimizer = adamw(model)
        for step in range(4):
            optimizer.zero_grad()
            for rank in range(size):
                for number in batches(rank, step):
                    (loss(model, rank, number) / size).backward()
            optimizer.step()
        return flat(model)

    async def rank_does(rank: int) -> torch.Tensor:
        model = model_of(rank)
        gradients, optimizer = ac.overlap_gradients(model, **SMALL), adamw(model)
        for step in range(4):
            optimizer.zero_grad()
            *first, last = batches(rank, step)
            with gradients.no_sync():
                for number in first:
                    loss(model, rank, number).backward()
            loss(model, rank, last).backward()
            await gradients
            optimizer.step()
        return flat(model)

    return Loops(rank_does, alone)


def evaluating_behind(size: int) -> Loops:
    """Tasks evaluate copies, each on its own lane, while training continues; metrics are coalesced."""

    async def evaluate(model: nn.Module, rank: int, step: int) -> None:
        with torch.no_grad():
            average = await ac.all_reduce(loss(model, rank, 100 + step), op="avg")
            torch.testing.assert_close(average, mean_loss(model, size, 100 + step))

    async def rank_does(rank: int) -> torch.Tensor:
        model = model_of(rank)
        gradients, optimizer = ac.overlap_gradients(model, **SMALL), adamw(model)
        async with ac.create_task_group() as tasks:
            for step in range(4):
                optimizer.zero_grad()
                now = loss(model, rank, step)
                with ac.coalescing():
                    steps = ac.all_gather(torch.tensor([rank + step]))
                    seen = ac.all_reduce({"samples": torch.tensor(4.0), "steps": 1})
                    now.backward()
                await gradients
                optimizer.step()
                assert (await steps).tolist() == [one + step for one in range(size)]
                assert (await seen)["steps"] == size
                tasks.start_soon(evaluate, copy.deepcopy(model), rank, step, name=f"evaluation {step}")
        return flat(model)

    return Loops(rank_does, lambda: plain(size))


def backward_in_a_thread(size: int) -> Loops:
    """Another task communicates on its own lane meanwhile."""

    async def talk(rank: int) -> None:
        for number in range(6):
            assert await ac.all_reduce(number) == number * size
            await anyio.sleep(0.0003 * rank)

    async def rank_does(rank: int) -> torch.Tensor:
        model = model_of(rank)
        gradients, optimizer = ac.overlap_gradients(model, **SMALL), adamw(model)
        async with ac.create_task_group() as tasks:
            tasks.start_soon(talk, rank, name="talk")
            for step in range(4):
                optimizer.zero_grad()
                await anyio.to_thread.run_sync(loss(model, rank, step).backward)
                await gradients
                optimizer.step()
        return flat(model)

    return Loops(rank_does, lambda: plain(size))


def sharded_and_resumed(size: int) -> Loops:
    """Parameter groups with their own schedules, clipped; another model and optimizer resume halfway."""

    def parts(model: Any) -> tuple[torch.optim.Optimizer, Any]:
        later = [*model[2].parameters(), *model[4].parameters()]
        groups = [{"params": model[0].parameters(), "lr": 3e-2}, {"params": later, "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        curves = [lambda step: 1 / (1 + step), lambda step: 1 - 0.1 * step]
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, curves)

    def alone() -> torch.Tensor:
        model = model_of()
        optimizer, schedule = parts(model)
        for step in range(6):
            optimizer.zero_grad()
            mean_loss(model, size, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
        return flat(model)

    async def rank_does(rank: int) -> torch.Tensor:
        model = model_of(rank)
        whole, schedule = parts(model)
        optimizer = ac.overlap.shard_optimizer(model, whole, bucket_bytes=500)
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy(
                    (model.state_dict(), await optimizer.full_state_dict(), schedule.state_dict())
                )
                model = model_of(rank + 7)
                whole, schedule = parts(model)
                optimizer = ac.overlap.shard_optimizer(model, whole, bucket_bytes=300, lane="resumed")
                model.load_state_dict(saved[0])
                optimizer.load_full_state_dict(saved[1])
                schedule.load_state_dict(saved[2])
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await optimizer.clip_grad_norm_(0.05)
            await optimizer.step()
            schedule.step()
        await optimizer.gathered()
        return flat(model)

    return Loops(rank_does, alone)


def sharded_tied_and_skipped(size: int) -> Loops:
    """Some steps are skipped after clipping; the last rank runs out of data."""

    def alone() -> torch.Tensor:
        model = Tied()
        optimizer = adamw(model)
        for step in range(6):
            optimizer.zero_grad()
            ranks = range(size - (step == 5))
            (sum(loss(model, rank, step) for rank in ranks) / size).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step % 3 != 1:
                optimizer.step()
        return flat(model)

    async def rank_does(rank: int) -> torch.Tensor:
        model = Tied(rank)
        optimizer = ac.overlap.shard_optimizer(model, adamw(model), bucket_bytes=300)
        for step in range(6):
            optimizer.zero_grad()
            if rank < size - (step == 5):
                loss(model, rank, step).backward()
            await optimizer.clip_grad_norm_(0.05)
            if step % 3 == 1:
                optimizer.zero_grad()
                continue
            await optimizer.step()
        await optimizer.gathered()
        return flat(model)

    return Loops(rank_does, alone)


def layers_left_out(size: int) -> Loops:
    """Each rank skips different layers; in one step a rank fails in mid-loop, and all skip that step."""

    def layers_of() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(6, 6) for _ in range(5)]).double()

    def taken(rank: int, step: int) -> list[bool]:
        drawn = random.Random(100 * step + rank)
        return [True, *(drawn.random() > 0.3 for _ in range(4))]

    def out(layers: Any, rank: int, step: int) -> torch.Tensor:
        x, y = batch(rank, step)
        for layer, called in zip(layers, taken(rank, step), strict=True):
            x = torch.tanh(layer(x)) if called else x
        return mse_loss(x[:, :3], y)

    def alone() -> torch.Tensor:
        layers = layers_of()
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step in [0, 1, 2, 4, 5]:
            optimizer.zero_grad()
            (sum(out(layers, rank, step) for rank in range(size)) / size).backward()
            optimizer.step()
        return flat(layers)

    async def rank_does(rank: int) -> torch.Tensor:
        layers = ac.overlap.shard_layers(layers_of(), ahead=2)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            called, fine = iter(taken(rank, step)), True
            try:
                async for layer in layers:
                    x = torch.tanh(layer(x)) if next(called) else x
                    if step == 3 and rank == 0:
                        raise ArithmeticError
            except ArithmeticError:
                fine = False
                await layers.finish_loop()
            if await ac.all_reduce(fine, op="and"):
                (mse_loss(x[:, :3], y) / size).backward()
                optimizer.step()
        whole = await layers.full_state_dict()
        return torch.cat([value.reshape(-1) for value in whole.values()])

    return Loops(rank_does, alone)


def a_loop_that_begins_while_backward_runs(size: int) -> Loops:
    """It may be the next batch's forward, while a thread runs backward for this one."""

    def layers_of() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]).double()

    def alone() -> torch.Tensor:
        layers = layers_of()
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(size):
                x, y = batch(rank, step)
                for layer in layers:
                    x = torch.tanh(layer(x))
                (mse_loss(x[:, :3], y) / size).backward()
            optimizer.step()
        return flat(layers)

    async def rank_does(rank: int) -> torch.Tensor:
        layers = ac.overlap.shard_layers(layers_of())
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def begin(_: torch.Tensor) -> None:
            iter(layers)

        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            async for layer in layers:
                x = torch.tanh(layer(x))
                x.register_hook(begin)
            (mse_loss(x[:, :3], y) / size).backward()
            optimizer.step()
        whole = await layers.full_state_dict()
        return torch.cat([value.reshape(-1) for value in whole.values()])

    return Loops(rank_does, alone)


def two_optimizers_in_two_tasks(size: int) -> Loops:
    """The optimizers reach their steps in a different order on every rank."""

    def alone() -> torch.Tensor:
        models = model_of(1), model_of(2)
        for model in models:
            optimizer = adamw(model)
            for step in range(4):
                optimizer.zero_grad()
                mean_loss(model, size, step).backward()
                optimizer.step()
        return flat(*models)

    async def train(model: nn.Module, optimizer: Any, rank: int) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            await anyio.sleep(0.0005 * ((step + rank) % 3))
            await optimizer.step()

    async def rank_does(rank: int) -> torch.Tensor:
        models = model_of(1), model_of(2)
        optimizers = [ac.async_optim(adamw(model)) for model in models]
        async with ac.create_task_group() as tasks:
            for name, model, optimizer in zip("ab", models, optimizers, strict=True):
                tasks.start_soon(train, model, optimizer, rank, name=name)
        return flat(*models)

    return Loops(rank_does, alone)


LOOPS = [
    freezing,
    two_that_compete,
    hooks_of_the_user,
    accumulating_unevenly,
    evaluating_behind,
    backward_in_a_thread,
    sharded_and_resumed,
    sharded_tied_and_skipped,
    layers_left_out,
    a_loop_that_begins_while_backward_runs,
    two_optimizers_in_two_tasks,
]


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.__name__)
def test_parameters_are_those_of_one_process(loops: Callable[[int], Loops], size: int) -> None:
    rank_does, alone = loops(size)
    want = alone()
    for seed in range(4):
        loop, schedule = ("asyncio", "trio")[seed % 2], (RandomWalk(), PCT())[seed // 2]
        report = simulate(rank_does, world_size=size, seed=seed, loop=loop, schedule=schedule)
        report.check()
        for rank, got in report.results.items():
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12, msg=f"seed {seed}, rank {rank}")


def test_layers_skip_a_step_together_when_one_rank_overflows() -> None:
    """Each rank sees only its own part of the gradients."""

    async def rank_does(rank: int) -> tuple[float, list[float]]:
        torch.manual_seed(0)
        layers = ac.overlap.shard_layers(nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        before = [part.detach().clone() for part in layers.parameters()]
        x = torch.ones(2, 4)
        async for layer in layers:
            x = layer(x)
        scaler.scale(x.sum()).backward()
        if rank == 0:
            next(iter(layers.parameters())).grad[0] = float("inf")
        for forgetful in (scaler.step, scaler.unscale_):
            with raising(ac.InvalidArgumentError, "`await layers.unscale_(scaler, optimizer)` before"):
                forgetful(optimizer)
        await layers.unscale_(scaler, optimizer)
        await layers.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        moved = [
            float((a - b.detach()).abs().max()) for a, b in zip(before, layers.parameters(), strict=True)
        ]
        return scaler.get_scale(), moved

    for rank, (scale, moved) in simulate(rank_does, world_size=3).results.items():
        assert scale == 32.0, rank
        assert not any(moved), rank


async def overflowed(rank: int, sets: list[Any], owned: list[slice], at: int) -> list[bool]:
    """Step an optimizer of each of ``owned`` parts, as rank 0's part ``at`` overflows; return which stay."""
    parts = [part for layers in sets for part in layers.parameters()]
    optimizers = [torch.optim.SGD(parts[own], lr=0.1) for own in owned]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x = torch.ones(2, 4)
    for layers in sets:
        async for layer in layers:
            x = layer(x)
    scaler.scale(x.sum()).backward()
    if rank == 0:
        parts[at].grad[0] = float("inf")
    before = [part.detach().clone() for part in parts]
    for optimizer in optimizers:
        await sets[0].unscale_(scaler, optimizer)
        scaler.step(optimizer)
    return [torch.equal(old, part) for old, part in zip(before, parts, strict=True)]


def test_an_overflow_leaves_the_gradients_of_another_optimizer_alone() -> None:
    """As in one process. Regression: they became NaN, also those that accumulate over several steps."""

    async def rank_does(rank: int) -> list[bool]:
        torch.manual_seed(0)
        layers = ac.overlap.shard_layers(nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]))
        return await overflowed(rank, [layers], [slice(0, 1), slice(1, 2)], at=0)

    for rank, unmoved in simulate(rank_does, world_size=3).results.items():
        assert unmoved == [True, False], rank


def test_an_overflow_in_one_of_two_sets_of_layers_skips_the_step_of_their_optimizer() -> None:
    """Regression: the ranks agreed on one set alone, and only the rank that saw the overflow skipped it."""

    async def rank_does(rank: int) -> list[bool]:
        torch.manual_seed(0)
        sets = [ac.overlap.shard_layers([nn.Linear(4, 4)]) for _ in range(2)]
        return await overflowed(rank, sets, [slice(None)], at=1)

    for rank, unmoved in simulate(rank_does, world_size=3).results.items():
        assert unmoved == [True, True], rank

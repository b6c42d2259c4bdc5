"""Ranks of a sharded optimizer that would step differently are refused before one updates its part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
from overlapping import SMALL, batch, loss_of, network
from ranks import Rank, raising
from test_overlap_sharded import average, both_step, gathered, parameter_groups, same_parameters, step
from worlds import World

Change = Callable[[nn.Module, Any], None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=0.01)


def with_tensors(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def another_rate(_: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"] = 0.5


def other_betas(_: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)


def fill_rate(_: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.5)


def step_scheduler(_: nn.Module, optimizer: Any) -> None:
    optimizer = getattr(optimizer, "wrapped", optimizer)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


def load(_: nn.Module, optimizer: Any, steps: int) -> None:
    other = network()
    torch.manual_seed(1)
    made = adamw(other) if isinstance(optimizer.param_groups[0].get("betas"), tuple) else with_momentum(other)
    for _ in range(steps):
        loss_of(other, batch(0, 0)).backward()
        made.step()
    if isinstance(optimizer, ac.overlap.ShardedOptimizer):
        optimizer.load_full_state_dict(made.state_dict())
    else:
        optimizer.load_state_dict(copy.deepcopy(made.state_dict()))


def load_model(model: nn.Module, _: Any) -> None:
    model.load_state_dict({name: torch.full_like(x, 0.5) for name, x in model.state_dict().items()})


def loss_of_turn(me: Rank, turn: int, model: nn.Module) -> Tensor:
    return loss_of(model, batch(me.rank, turn))


#: By name: the optimizer, what one rank does alone, and what the error says of it and of the others.
CHANGES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Change, str, str]] = {
    "lr": (adamw, another_rate, "lr 0.5 in param_groups[1]", "lr 0.05 in param_groups[1]"),
    "betas": (adamw, other_betas, "betas (0.5, 0.75) in param_groups[0]", "betas (0.9, 0.999)"),
    "tensor": (with_tensors, fill_rate, "lr 0.5 in param_groups[0]", "lr 0.25 in param_groups[0]"),
    "scheduler": (adamw, step_scheduler, "lr 0.005 in param_groups[0]", "lr 0.01 in param_groups[0]"),
    "load": (
        adamw,
        partial(load, steps=3),
        "load_full_state_dict() called since the last step: True",
        "False",
    ),
    "load, without steps": (with_momentum, partial(load, steps=1), "load_full_state_dict()", "False"),
    "model": (adamw, load_model, "the parameter '0.weight' of the checksum", ""),
}


async def changed_on_one(me: Rank, name: str, reduced: bool) -> None:
    make, change, its, theirs = CHANGES[name]
    last, others = me.size - 1, "rank 0 (of the group) has" if me.size == 2 else "ranks 0, 1"
    ours, twin = network(), network()
    whole = make(twin)
    with ac.overlap.shard_optimizer(ours, make(ours), lane=f"{name} {reduced}", **SMALL) as optimizer:
        await both_step(me, optimizer, whole, ours, twin, partial(loss_of_turn, me, 0))
        await gathered(me, optimizer)
        first = me.rank == last and not reduced
        if first:
            change(ours, optimizer)
        optimizer.zero_grad()
        loss_of(ours, batch(me.rank, 1)).backward()
        if reduced:
            await me.get(optimizer.reduced())
            if me.rank == last:
                change(ours, optimizer)
        before = [x.detach().clone() for x in ours.parameters()]
        with raising(ac.CollectiveMismatchError, others, f"and rank {last} has", its, theirs):
            await step(me, optimizer)
        assert all(map(torch.equal, before, ours.parameters())), "no rank has stepped"

        if me.rank != last:
            change(ours, optimizer)
        await step(me, optimizer)
        whole.zero_grad()
        if first:
            change(twin, whole)
        loss_of(twin, batch(me.rank, 1)).backward()
        if not first:
            change(twin, whole)
        average(twin)
        whole.step()
        await gathered(me, optimizer)
        same_parameters(me, ours, twin)
        await both_step(me, optimizer, whole, ours, twin, partial(loss_of_turn, me, 2))
    same_parameters(me, ours, twin)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_one_rank_alone(several: World, name: str, reduced: bool) -> None:
    """Named on every rank; once all have made it, the same step can be made. Regression: parts were mixed."""
    several.run(changed_on_one, name, reduced, runner="asyncio")


@pytest.mark.parametrize("name", ["lr"])
def test_a_change_on_one_rank_alone_however_one_waits(pair: World, runner: str, name: str) -> None:
    pair.run(changed_on_one, name, False, runner=runner)


async def changed_alike(me: Rank) -> None:
    ours, twin = network(), network()
    whole = adamw(twin)
    with ac.overlap.shard_optimizer(ours, adamw(ours), lane="alike", **SMALL) as optimizer:
        for turn in range(3):
            if me.rank == turn:
                ours.load_state_dict(ours.state_dict())  # of values that it has already, as the others do
                optimizer.param_groups[0]["foreach"] = True
            await both_step(me, optimizer, whole, ours, twin, partial(loss_of_turn, me, turn))
    same_parameters(me, ours, twin)


def test_what_makes_no_difference_may_differ(several: World) -> None:
    """Parameters that one rank has loaded and sent to the others, and how a step is computed."""
    several.run(changed_alike, runner="asyncio")


async def loaded_before(me: Rank) -> None:
    model = network()
    whole = adamw(model)
    if me.rank == 0:
        load(model, whole, steps=1)
    with ac.overlap.shard_optimizer(model, whole, lane="before", **SMALL) as optimizer:
        loss_of_turn(me, 0, model).backward()
        with raising(
            ac.CollectiveMismatchError, "rank 0 (of the group) has a state with exp_avg", "no other one"
        ):
            await optimizer.step()


def test_a_state_that_one_rank_has_loaded_before(pair: World) -> None:
    """The parameters of the first rank are sent to all others, but not the state of its optimizer."""
    pair.run(loaded_before, runner="asyncio")

"""Overlapped gradients in realistic training loops: same parameters as with the blocking loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import asynccoll as ac
import oracle
from overlapping import SMALL, batch, close, loss_of, network
from ranks import Rank
from worlds import World

#: How a loop gets from reduced gradients to a stepped model.
Finish = Callable[[nn.Module, torch.optim.Optimizer], None]


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01, "the test is to clip"
    optimizer.step()


class Scaled:
    """A gradient scaler; it unscales, clips, and skips steps that have overflowed."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        self.scales: list[float] = []

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())


class Loop:
    """One way to train: what is done to the loss and to the gradients. Each model has its own instance."""

    def __init__(self, how: str) -> None:
        self.model = network()
        if how == "parameters of bfloat16":
            self.model.bfloat16()
        self.autocast = how == "autocast"
        self.scaled = Scaled() if how == "gradient scaler" else None
        self.finish: Finish = self.scaled or (clipped if how == "clipped" else lambda _, steps: steps.step())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        x = x.to(next(self.model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            loss = loss_of(self.model, x)
        (self.scaled.scale(loss) if self.scaled else loss).backward()

    def step(self) -> None:
        self.finish(self.model, self.optimizer)


def blocking(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = ac.all_reduce(parameter.grad, op="avg").wait()


async def compared(
    me: Rank, how: str, ours: Loop, gradients: Callable[[], Awaitable[Any]], steps: int = 4
) -> None:
    twin = Loop(how)
    for step in range(steps):
        x = batch(me.rank, step)
        if step == 1 and me.rank == 0 and ours.scaled is not None:
            x = torch.full_like(x, torch.inf)  # on this rank only; every rank has to skip the step
        ours.backward(x)
        await gradients()
        ours.step()

        twin.backward(x)
        blocking(twin.model)
        twin.step()
    for mine, its in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
        if me.size <= 2:  # a sum of two does not depend on its order
            oracle.same(mine.detach(), its.detach())
        assert mine.dtype is torch.bfloat16 or close(mine, its)
    if ours.scaled is not None:
        assert ours.scaled.scales == [2.0**14, 2.0**13, 2.0**13, 2.0**14], "the second was skipped"


WAYS = ["clipped", "autocast", "parameters of bfloat16", "gradient scaler"]


async def in_every_way(me: Rank) -> None:
    for how in WAYS:
        with me.case(how):
            ours = Loop(how)
            with ac.overlap_gradients(ours.model, **SMALL) as gradients:
                await compared(me, how, ours, lambda reduced=gradients: me.get(reduced))


@pytest.mark.parametrize("waits", ["asyncio", "blocking"])
def test_clipping_and_mixed_precision(world: World, waits: str) -> None:
    """Parameters are equal bit for bit on one and two ranks; an overflow on one rank is skipped on all."""
    world.run(in_every_way, runner=waits)

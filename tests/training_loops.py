"""Training loops as users write them around a model and its optimizer: each function is one step.

This module must not know how gradients are averaged: it asks the `Helper` of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import asynccoll as ac
from training_helpers import Helper, Waits, patiently


@dataclass
class Run:
    """One training run: `batch` returns the rows of this process, one tensor per rank it stands for."""

    helper: Helper
    batch: Callable[[int, int], list[Tensor | None]]
    size: int
    scaler: torch.amp.GradScaler | None = None
    in_thread: bool = False

    def losses(self, step: int, part: int = 0) -> list[Tensor]:
        """Return the loss of each rank that this process stands for."""
        return [self.helper.loss(x) for _, x in _there(self.batch(step, part))]

    async def backward(self, step: int, part: int = 0, blown: bool = False) -> None:
        """Run backward for the mean loss over the ranks of this process; do nothing without data."""
        found = self.batch(step, part)
        losses = [
            self.helper.loss(x) * (torch.inf if blown and rank == 0 else 1) for rank, x in _there(found)
        ]
        await self.backward_of(losses)

    async def backward_of(self, losses: list[Tensor]) -> None:
        if not losses:
            return
        ranks = 1 if self.helper.is_rank else self.size
        loss = sum(losses[1:], losses[0]) / ranks * self.helper.scale
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.in_thread:
            await asyncio.to_thread(loss.backward)
        else:
            loss.backward()

    async def step(self) -> None:
        await self.helper.step(self.helper.optimizer.step)

    def waits(self, step: int) -> Waits:
        """Return how this rank waits in that step: one rank cancels a wait that blocks, and repeats it."""
        cut = self.helper.is_rank and ac.get_rank() == step % self.size
        return patiently if cut else lambda wait: wait()


def _there(found: list[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    for index, x in enumerate(found):
        if x is not None:
            yield getattr(x, "rank", index), x


async def plain(run: Run, step: int) -> None:
    await run.backward(step)
    await run.helper.reduced()
    await run.step()


async def in_a_thread(run: Run, step: int) -> None:
    run.in_thread = True
    await plain(run, step)


async def accumulated(run: Run, step: int) -> None:
    for part in range(2):
        await run.backward(step, part)
        await run.helper.reduced()
    await run.step()


async def unsynced(run: Run, step: int) -> None:
    with run.helper.no_sync():
        await run.backward(step, 0)
        await run.backward(step, 1)
    await run.backward(step, 2)
    await run.helper.reduced()
    await run.step()


async def unsynced_later(run: Run, step: int) -> None:
    """Accumulate further gradients, without reduction at first, on top of reduced ones."""
    await run.backward(step, 0)
    await run.helper.reduced()
    with run.helper.no_sync():
        await run.backward(step, 1)
    await run.backward(step, 2)
    await run.helper.reduced()
    await run.step()


async def clipped(run: Run, step: int) -> None:
    await run.backward(step)
    await run.helper.reduced()
    await run.helper.clip(0.01)
    await run.step()


async def skipped(run: Run, step: int) -> None:
    await run.backward(step)
    await run.helper.reduced()
    if step != 1:
        await run.step()


async def forgotten(run: Run, step: int) -> None:
    """Drop the gradients between two backwards."""
    await run.backward(step, 0)
    await run.helper.reduced()
    run.helper.optimizer.zero_grad(set_to_none=step % 2 == 0)
    await run.backward(step, 1)
    await run.helper.reduced()
    await run.step()


async def scaled(run: Run, step: int) -> None:
    if run.scaler is None:
        device = next(run.helper.model.parameters()).device.type
        kind = device if device == "cuda" else "cpu"  # the CPU's scaler also scales torch_xla's tensors
        run.scaler = torch.amp.GradScaler(kind, init_scale=64.0, growth_interval=2)
    await run.backward(step, blown=step == 1)
    await run.helper.reduced()
    await run.helper.unscale(run.scaler)
    await run.helper.clip(0.1)
    await run.helper.scaled_step(run.scaler)
    run.scaler.update()


async def without_data(run: Run, step: int) -> None:
    """Run a plain step; `batch` gives the last rank no data for the second step."""
    await plain(run, step)


async def recomputed(run: Run, step: int) -> None:
    """Checkpoint the activations."""
    run.helper.model.recomputed = True
    await plain(run, step)


async def skipped_after_clipping(run: Run, step: int) -> None:
    """Skip a step after clipping, as if the norm were not finite."""
    await run.backward(step)
    await run.helper.reduced()
    await run.helper.clip(0.01)
    if step != 1:
        await run.step()


async def unsynced_between(run: Run, step: int) -> None:
    """Run a backward without reduction while earlier gradients are in flight, which may be refused."""
    await run.backward(step, 0)
    refused = False
    with run.helper.no_sync():
        try:
            await run.backward(step, 1)
        except ac.InvalidArgumentError:
            refused = True
    if refused:
        await run.helper.recovered()
        run.helper.optimizer.zero_grad()
        with run.helper.no_sync():
            await run.backward(step, 0)
            await run.backward(step, 1)
    await run.backward(step, 2)
    await run.helper.reduced()
    await run.step()


async def cut_short(run: Run, step: int) -> None:
    """Cancel the wait for the gradients, and repeat it."""
    await run.backward(step)
    await run.helper.cut_short()
    await run.step()


async def uneven(run: Run, step: int) -> None:
    """Use several batches per step, fewer on some ranks; all ranks reduce after each but the last."""
    for part in range(3):
        await run.backward(step, part)
        if part < 2:
            await run.helper.reduced()
    await run.helper.last_reduced()
    await run.step()


async def cut_short_on_some(run: Run, step: int) -> None:
    """Cancel and repeat, on some ranks, the waits after the gradients, and those of saving."""
    waits = run.waits(step)
    await run.backward(step)
    await run.helper.cut_short()
    await waits(lambda: run.helper.clip(0.01))
    await waits(run.step)
    await run.helper.saved(waits)


async def halved(run: Run, step: int) -> None:
    """Change reduced gradients before further ones are added."""
    await run.backward(step, 0)
    await run.helper.reduced()
    run.helper.halve(replaced=step == 1)
    await run.backward(step, 1)
    await run.helper.reduced()
    await run.step()


async def touched(run: Run, step: int) -> None:
    """Change gradients when that is refused, and repeat the step."""
    if run.helper.is_rank and run.size > 1:
        (x,) = run.batch(step, 5)
        assert x is not None
        await run.helper.touch(x)
        run.helper.optimizer.zero_grad()
    await plain(run, step)


async def interrupted(run: Run, step: int) -> None:
    """Run a backward that raises on the last rank, and repeat the step on all ranks."""
    if run.helper.recovers:
        (x,) = run.batch(step, 5)
        assert x is not None
        await run.helper.interrupted(x, here=ac.get_rank() == run.size - 1)
        run.helper.optimizer.zero_grad()
    await plain(run, step)


async def graphed(run: Run, step: int) -> None:
    """Run a backward that keeps the graph of the gradients, and repeat the step."""
    if run.helper.recovers:
        (x,) = run.batch(step, 5)
        assert x is not None
        await run.helper.graphed(x)
        run.helper.optimizer.zero_grad()
    await plain(run, step)


async def penalized(run: Run, step: int) -> None:
    """Add the norm of the gradients to the loss, so their graph is differentiated."""
    trained = [x for x in run.helper.model.parameters() if x.requires_grad]
    losses = []
    for loss in run.losses(step):
        found = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        losses.append(loss + 0.1 * sum(x.abs().square().sum() for x in found if x is not None))
    await run.backward_of(losses)
    await run.helper.reduced()
    await run.step()


async def coalesced(run: Run, step: int) -> None:
    """Coalesce a loss over all ranks with a metric that has no gradient."""
    losses = run.losses(step)
    total = metric = sum(losses[1:], losses[0])
    if run.helper.is_rank:
        call = {"lane": f"{run.helper.lane} joint"}
        # The block may end in either mode; each call keeps the mode in which it was made.
        with torch.set_grad_enabled(step % 2 == 0):
            async with ac.coalescing():
                with torch.no_grad():
                    metric = ac.all_reduce(losses[0], **call)
                with torch.enable_grad():
                    total = ac.all_reduce(losses[0], **call)
        total, metric = await total, await metric
    # A rank's metric is not detached here: the test is that it has no gradient.
    metric = metric if run.helper.is_rank else metric.detach()
    await run.backward_of([loss * (1 + metric) + total.square() for loss in losses])
    await run.helper.reduced()
    await run.step()


async def chained(run: Run, step: int) -> None:
    """Sum over all ranks twice in place, in one block, which either is refused or gives the right result."""
    losses = run.losses(step)
    number = sum(losses).detach() * run.size
    if run.helper.is_rank:
        number = await _summed_twice(losses[0].detach(), lane=f"{run.helper.lane} joint")
    await run.backward_of([loss * number for loss in losses])
    await run.helper.reduced()
    await run.step()


async def _summed_twice(number: Tensor, **call: str) -> Tensor:
    copy = number.clone()
    try:
        async with ac.coalescing():
            works = [ac.all_reduce(copy, out=copy, **call) for _ in range(2)]
        for work in works:
            await work
    except ac.InvalidArgumentError:
        copy = number.clone()
        for _ in range(2):
            await ac.all_reduce(copy, out=copy, **call)
    return copy


async def added(run: Run, step: int) -> None:
    """Add half of the parameters to the optimizer after the first step."""
    if step == 1:
        given = run.helper.optimizer.param_groups[0]["params"]
        known = {id(x) for x in given}
        new = [x for x in run.helper.model.parameters() if id(x) not in known]
        run.helper.optimizer.add_param_group({"params": new})
    await plain(run, step)


LOOPS: dict[str, Callable[[Run, int], Awaitable[None]]] = {
    "plain": plain,
    "in a thread": in_a_thread,
    "accumulated": accumulated,
    "no_sync": unsynced,
    "no_sync on top": unsynced_later,
    "clipped": clipped,
    "skipped": skipped,
    "forgotten": forgotten,
    "scaled": scaled,
    "without data": without_data,
    "checkpointed": recomputed,
    "clipped, skipped": skipped_after_clipping,
    "no_sync between": unsynced_between,
    "cut short": cut_short,
    "cut short on some": cut_short_on_some,
    "uneven": uneven,
    "halved": halved,
    "touched": touched,
    "interrupted": interrupted,
    "graph of gradients": graphed,
    "gradient penalty": penalized,
    "coalesced": coalesced,
    "chained": chained,
    "added": added,
}

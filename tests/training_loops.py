"""Loops that people write around a model and its optimizer: each function here is one step of one.

Knows nothing of how gradients are averaged: it asks the `Helper` of its run.
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
    """One training run: `batch` gives the rows of this process, one tensor for each rank it stands for."""

    helper: Helper
    batch: Callable[[int, int], list[Tensor | None]]
    size: int
    scaler: torch.amp.GradScaler | None = None
    in_thread: bool = False

    def losses(self, step: int, part: int = 0) -> list[Tensor]:
        """Of each rank that this process stands for."""
        return [self.helper.loss(x) for _, x in _there(self.batch(step, part))]

    async def backward(self, step: int, part: int = 0, blown: bool = False) -> None:
        """Of the mean loss over the ranks that this process stands for; nothing without data."""
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
        """How this rank waits in that step: some ranks give up at once and wait again."""
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
    """What is reduced already, and more on top of it."""
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
    """Gradients that are dropped between two backwards."""
    await run.backward(step, 0)
    await run.helper.reduced()
    run.helper.optimizer.zero_grad(set_to_none=step % 2 == 0)
    await run.backward(step, 1)
    await run.helper.reduced()
    await run.step()


async def scaled(run: Run, step: int) -> None:
    if run.scaler is None:
        device = next(run.helper.model.parameters()).device.type
        kind = device if device == "cuda" else "cpu"  # torch_xla's tensors are scaled by the CPU's
        run.scaler = torch.amp.GradScaler(kind, init_scale=64.0, growth_interval=2)
    await run.backward(step, blown=step == 1)
    await run.helper.reduced()
    await run.helper.unscale(run.scaler)
    await run.helper.clip(0.1)
    await run.helper.scaled_step(run.scaler)
    run.scaler.update()


async def without_data(run: Run, step: int) -> None:
    """The last rank has none for the second step; `batch` sees to it."""
    await plain(run, step)


async def recomputed(run: Run, step: int) -> None:
    """Activations are checkpointed."""
    run.helper.model.recomputed = True
    await plain(run, step)


async def skipped_after_clipping(run: Run, step: int) -> None:
    """As where the norm was not finite."""
    await run.backward(step)
    await run.helper.reduced()
    await run.helper.clip(0.01)
    if step != 1:
        await run.step()


async def unsynced_between(run: Run, step: int) -> None:
    """A backward without reduction before the one that was sent is awaited, which may be refused."""
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
    """The wait for the gradients is cancelled, and done again."""
    await run.backward(step)
    await run.helper.cut_short()
    await run.step()


async def uneven(run: Run, step: int) -> None:
    """Several batches for a step, of which some ranks have fewer; all reduce after each but the last."""
    for part in range(3):
        await run.backward(step, part)
        if part < 2:
            await run.helper.reduced()
    await run.helper.last_reduced()
    await run.step()


async def cut_short_on_some(run: Run, step: int) -> None:
    """Waits for what follows the gradients are cancelled on some ranks, and done again; so is saving."""
    waits = run.waits(step)
    await run.backward(step)
    await run.helper.cut_short()
    await waits(lambda: run.helper.clip(0.01))
    await waits(run.step)
    await run.helper.saved(waits)


async def halved(run: Run, step: int) -> None:
    """Gradients that are reduced are changed before more are added."""
    await run.backward(step, 0)
    await run.helper.reduced()
    run.helper.halve(replaced=step == 1)
    await run.backward(step, 1)
    await run.helper.reduced()
    await run.step()


async def touched(run: Run, step: int) -> None:
    """Gradients are changed where that is refused, and the step begins anew."""
    if run.helper.is_rank and run.size > 1:
        (x,) = run.batch(step, 5)
        assert x is not None
        await run.helper.touch(x)
        run.helper.optimizer.zero_grad()
    await plain(run, step)


async def interrupted(run: Run, step: int) -> None:
    """A backward that raises on the last rank, whose step begins anew on all."""
    if run.helper.recovers:
        (x,) = run.batch(step, 5)
        assert x is not None
        await run.helper.interrupted(x, here=ac.get_rank() == run.size - 1)
        run.helper.optimizer.zero_grad()
    await plain(run, step)


async def graphed(run: Run, step: int) -> None:
    """A backward that keeps the graph of the gradients, whose step begins anew."""
    if run.helper.recovers:
        (x,) = run.batch(step, 5)
        assert x is not None
        await run.helper.graphed(x)
        run.helper.optimizer.zero_grad()
    await plain(run, step)


async def penalized(run: Run, step: int) -> None:
    """By the norm of the gradients, whose graph is differentiated."""
    trained = [x for x in run.helper.model.parameters() if x.requires_grad]
    losses = []
    for loss in run.losses(step):
        found = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        losses.append(loss + 0.1 * sum(x.abs().square().sum() for x in found if x is not None))
    await run.backward_of(losses)
    await run.helper.reduced()
    await run.step()


async def coalesced(run: Run, step: int) -> None:
    """A loss over all ranks, and a metric without gradient, are sent together."""
    losses = run.losses(step)
    total = metric = sum(losses[1:], losses[0])
    if run.helper.is_rank:
        call = {"lane": f"{run.helper.lane} joint"}
        # The block ends in either mode, which is that of neither call.
        with torch.set_grad_enabled(step % 2 == 0):
            async with ac.coalescing():
                with torch.no_grad():
                    metric = ac.all_reduce(losses[0], **call)
                with torch.enable_grad():
                    total = ac.all_reduce(losses[0], **call)
        total, metric = await total, await metric
    # (Without the step's own detach of the metric, which is what is to be seen.)
    metric = metric if run.helper.is_rank else metric.detach()
    await run.backward_of([loss * (1 + metric) + total.square() for loss in losses])
    await run.helper.reduced()
    await run.step()


async def chained(run: Run, step: int) -> None:
    """A number of all ranks, of which the same is taken again: in a block that is refused, or comes to it."""
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
    """The optimizer is given half of the parameters after the first step."""
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

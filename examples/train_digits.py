"""Train a small convolutional network on real handwritten digits, with its communication hidden.

    asynccoll run -n 2 examples/train_digits.py

Every rank runs a hand-written training loop:

- gradients are reduced in buckets while backward is still running (``ac.overlap_gradients``), and are
  awaited before the optimizer's step;
- a second task validates concurrently, and reduces its metrics on its own lane;
- the result is checked: all ranks hold the same parameters, which match those of a blocking run;
- a step is timed three ways, alternating: blocking, torch's DistributedDataParallel, overlapped;
- a few steps are recorded and drawn as a timeline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import asynccoll as ac
from digits import Batches, digits, network
from reporting import Advance, Step, meaning, over_a_link, progress, table, time_steps

Mark = Callable[[str], AbstractContextManager[None]]  # opens a span of the timeline, or does nothing

BUCKETS = {"bucket_bytes": 256 << 10, "first_bucket_bytes": 64 << 10}  # small buckets for a small model
EPOCHS = 8
RECORDED_STEPS = 3
TOLERANCE = 1e-3  # for parameters after a hundred steps: beyond two ranks, the order of summation differs


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, nesterov=True)


def unmarked(_: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


# One step, three ways


class Overlapped:
    """Gradients are sent as backward produces them."""

    def __init__(self, model: nn.Module, *, in_thread: bool) -> None:
        self.model = model
        self.in_thread = in_thread  # otherwise backward blocks the event loop, as any computation does
        self.optimizer = optimizer_for(model)
        self.gradients = ac.overlap_gradients(model, **BUCKETS)
        self.mark: Mark = unmarked

    async def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        with self.mark("forward"):
            loss = cross_entropy(self.model(x), y)
        with self.mark("backward"):
            if self.in_thread:
                await asyncio.to_thread(loss.backward)
            else:
                loss.backward()
        await self.gradients
        with self.mark("optimizer"):
            self.optimizer.step()


class Blocking:
    """One blocking all_reduce per parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = optimizer_for(model)

    async def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        for parameter in self.model.parameters():
            ac.all_reduce(parameter.grad, op="avg", out=parameter.grad).wait()
        self.optimizer.step()


class TorchDDP:
    """torch's DDP, on torch's default group (which ``ac.initialize`` has set up)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
        self.optimizer = optimizer_for(self.model)

    async def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


# Training, with concurrent validation


class Training:
    """The training loop, the validating task, and what they exchange: snapshots and the accuracy."""

    def __init__(self, batches: Batches, epochs: int) -> None:
        self.batches = batches
        self.epochs = epochs
        self.snapshots: asyncio.Queue[nn.Module | None] = asyncio.Queue()
        self.accuracy = 0.0
        self.mark: Mark = unmarked
        self.timeline: ac.trace.Timeline | None = None

    async def train(self, way: Overlapped, advance: Advance) -> None:
        for epoch in range(self.epochs):
            batches = self.batches.of(epoch)
            if epoch == self.epochs // 2:
                with self.recording(way):
                    for x, y in itertools.islice(batches, RECORDED_STEPS):
                        await way.step(x, y)
                advance(RECORDED_STEPS, self.accuracy)
            for x, y in batches:
                await way.step(x, y)
                advance(1, self.accuracy)
            await self.snapshots.put(copy.deepcopy(way.model))
        await self.snapshots.put(None)

    @contextlib.contextmanager
    def recording(self, way: Overlapped) -> Iterator[None]:
        """Record both tasks on a timeline."""
        with ac.trace.recording() as timeline:
            way.mark = lambda name: timeline.span(name, row="training")
            self.mark = lambda name: timeline.span(name, row="validation")
            yield
        way.mark = self.mark = unmarked
        self.timeline = timeline

    async def validate(self, x: Tensor, y: Tensor, advance: Advance) -> None:
        """Evaluate each snapshot on this rank's share of the test data, and sum over all ranks."""
        while (model := await self.snapshots.get()) is not None:
            with self.mark("validate"):
                right = await asyncio.to_thread(count_right, model, x, y)
            total = await ac.all_reduce({"right": right, "seen": len(y)})
            self.accuracy = total["right"] / total["seen"]
            advance(0, self.accuracy)


@torch.no_grad()
def count_right(model: nn.Module, x: Tensor, y: Tensor) -> int:
    return int((model(x).argmax(1) == y).sum())


# Checking


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


async def same_on_all_ranks(model: nn.Module) -> bool:
    mine = flat(model)
    least, most = await ac.wait_all([ac.all_reduce(mine, op="min"), ac.all_reduce(mine, op="max")])
    return torch.equal(least, most)


# Timing


async def three_ways(
    start: nn.Module, batches: Batches, steps: int
) -> tuple[dict[str, list[float]], ac.trace.Timeline]:
    """Return the seconds of each step, by way, and a timeline of a few overlapped steps."""
    overlapped = Overlapped(copy.deepcopy(start), in_thread=False)  # no other task needs the event loop
    ways: dict[str, Step] = {"blocking": Blocking(copy.deepcopy(start)).step}
    if dist.is_initialized():  # not in the world of one without a launcher
        ways["DDP"] = TorchDDP(copy.deepcopy(start)).step
    ways["overlapped"] = overlapped.step
    seconds = await time_steps(ways, batches, steps)
    with ac.trace.recording() as timeline:
        overlapped.mark = lambda name: timeline.span(name, row="training")
        for x, y in itertools.islice(batches.of(0), 4 * RECORDED_STEPS):
            await overlapped.step(x, y)
    overlapped.gradients.close()
    return seconds, timeline


# The program


async def main(arguments: argparse.Namespace) -> None:
    ac.initialize()
    say = print if ac.get_rank() == 0 else (lambda *_: None)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the ranks share this machine
    data = digits(ac.get_rank(), ac.get_world_size())
    batches = Batches(data.train, max(1, arguments.batch // ac.get_world_size()))
    start = network()
    await ac.overlap.broadcast_parameters(start)
    if arguments.link:
        seconds, timeline = await three_ways(start, batches, arguments.steps)
        say("the same steps over a slow link:")
        say(table(seconds))
        say(over_a_link(seconds, timeline.hidden_fraction(), arguments.link))
        ac.finalize()
        return

    training = Training(batches, arguments.epochs)
    overlapped = Overlapped(copy.deepcopy(start), in_thread=True)  # lets the validating task run
    with progress(arguments.epochs * batches.per_epoch) as advance:
        async with ac.create_task_group() as tasks:
            tasks.start_soon(training.train, overlapped, advance, name="training")
            tasks.start_soon(training.validate, *data.test, advance, name="validation")
    say(f"test accuracy {training.accuracy:.2%} after {arguments.epochs} epochs")
    assert training.accuracy >= 0.95 or arguments.epochs < EPOCHS, "that is less than 95 %"
    assert await same_on_all_ranks(overlapped.model), "the ranks have drifted apart"
    say(f"the ranks ({ac.get_world_size()}) hold the same parameters, bit for bit")

    blocking = Blocking(copy.deepcopy(start))
    for epoch in range(arguments.epochs):
        for x, y in batches.of(epoch):
            await blocking.step(x, y)
    apart = (flat(overlapped.model) - flat(blocking.model)).abs().max().item()
    assert apart <= TOLERANCE, apart
    same = "are the same" if apart == 0 else f"differ from these by at most {apart:.1g}"
    say(f"the parameters of a run that blocks {same}")

    overlapped.gradients.close()
    seconds, _ = await three_ways(start, batches, arguments.steps)
    say(table(seconds))
    say(meaning(seconds, training.timeline.hidden_fraction()))
    if ac.get_rank() == 0:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        say(f"what ran when: {training.timeline.plot(arguments.picture).resolve()}")
    ac.finalize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, communication hidden.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, on all ranks")
    parser.add_argument("--steps", type=int, default=30, help="how many steps to time each way")
    parser.add_argument("--link", default="", help="only time the steps, over a link that is called so")
    parser.add_argument("--picture", type=Path, default=Path("build/timeline.png"))
    asyncio.run(main(parser.parse_args()))

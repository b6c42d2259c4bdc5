"""Train a small GPT on real text; stop in the middle and resume, even on a different number of ranks.

    asynccoll run -n 2 examples/train_gpt.py --until 150
    asynccoll run -n 2 examples/train_gpt.py             # resumes from the checkpoint

The training loop has what real ones have: gradient accumulation over several batches, clipping, a
learning-rate schedule, and evaluation in the background, in a task with its own lane. ``--way`` selects what
averages the gradients: ``ac.overlap_gradients``, ``ac.overlap.shard_optimizer`` or, for comparison, torch's
DistributedDataParallel. ``compare_gpt.py`` runs all of them and draws their losses.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import asynccoll as ac
from gpt import GPT, Corpus, adamw, learning_rate

BATCHES = 4  # per step, over all ranks: each rank accumulates its share, so there may be 1, 2 or 4 ranks
SAMPLES = 2  # per batch
CLIP = 1.0
BUCKETS = {"bucket_bytes": 512 << 10, "first_bucket_bytes": 128 << 10}  # small buckets for a small model
EVALUATE_EVERY = 25  # steps; four times in a short training
EVALUATIONS = 4  # batches per evaluation, over all ranks
SAMPLED = 97  # one in so many parameters is recorded in each step, for comparing runs

# One step, three ways


class Way(Protocol):
    """The parts of a step that depend on what averages the gradients."""

    async def backward(self, loss: Tensor) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in backward without sending them."""

    async def step(self) -> None:
        """Clip the gradients averaged over all ranks, and update the parameters with them."""

    async def state(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, in torch's format."""


class Overlapped:
    """Gradients are sent as backward produces them, in a thread, so that evaluation continues meanwhile."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.gradients = ac.overlap_gradients(model, **BUCKETS)

    async def backward(self, loss: Tensor) -> None:
        await asyncio.to_thread(loss.backward)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.gradients.no_sync()

    async def step(self) -> None:
        await self.gradients
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    async def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Sharded:
    """The same, but each rank updates its shard of the parameters; the next forward gathers them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = ac.overlap.shard_optimizer(model, optimizer, **BUCKETS)

    async def backward(self, loss: Tensor) -> None:
        await asyncio.to_thread(loss.backward)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    async def step(self) -> None:
        await self.optimizer.clip_grad_norm_(CLIP)
        await self.optimizer.step()
        self.optimizer.zero_grad()

    async def state(self) -> dict[str, Any]:
        await self.optimizer.gathered()
        return await self.optimizer.full_state_dict()


class TorchDDP:
    """torch's DDP, on torch's default group (which ``ac.initialize`` has set up)."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)
        self.optimizer = optimizer

    async def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    async def step(self) -> None:
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    async def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


WAYS = {"overlapped": Overlapped, "sharded": Sharded, "ddp": TorchDDP}

# Training, with evaluation in the background


class Run:
    """The contents of a checkpoint: the parameters, the optimizer, and the losses so far."""

    def __init__(self, corpus: Corpus) -> None:
        torch.manual_seed(0)
        self.model = GPT(len(corpus.alphabet))
        self.optimizer = adamw(self.model)
        self.losses: list[float] = []  # for each step, over all ranks
        self.evaluations: list[tuple[int, float]] = []
        self.sampled: list[Tensor] = []  # some parameters, as they were before each update

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.losses, self.evaluations = saved["losses"], saved["evaluations"]
        self.sampled = list(saved["sampled"])

    def save(self, path: Path, optimizer: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": optimizer, "losses": self.losses}
        torch.save(state | {"evaluations": self.evaluations, "sampled": torch.stack(self.sampled)}, path)


def some(model: nn.Module) -> Tensor:
    return torch.cat([x.detach().flatten() for x in model.parameters()])[::SAMPLED].clone()


class Training:
    """The training loop, and the task that evaluates the snapshots it hands over."""

    def __init__(self, corpus: Corpus, run: Run, way: str) -> None:
        self.corpus = corpus
        self.run = run
        self.in_background = way != "ddp"  # there, evaluation runs inside the loop
        self.judge = GPT(len(corpus.alphabet))
        self.snapshots: asyncio.Queue[tuple[int, dict[str, Tensor]] | None] = asyncio.Queue()
        self.way: Way = WAYS[way](run.model, run.optimizer)
        self.forward = self.way.model if isinstance(self.way, TorchDDP) else run.model

    async def train(self, until: int, steps: int) -> None:
        """Train up to step ``until`` of a schedule of ``steps``."""
        losses = []
        for step in range(len(self.run.losses), until):
            for group in self.run.optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            loss = await self.accumulate(step)
            losses.append(ac.all_reduce(loss / BATCHES))  # awaited at the end
            self.run.sampled.append(some(self.run.model))
            await self.way.step()
            if (step + 1) % min(EVALUATE_EVERY, max(1, steps // 4)) == 0 or step + 1 == steps:
                await self.hand_over(step + 1)
        self.run.losses += await ac.wait_all(losses)
        await self.snapshots.put(None)

    async def accumulate(self, step: int) -> float:
        """Run backward for this rank's batches of a step. Returns the sum of their losses."""
        total = 0.0
        *most, last = range(ac.get_rank(), BATCHES, ac.get_world_size())
        for number in [*most, last]:
            x, y = self.corpus.batch(SAMPLES, seed=step * BATCHES + number)
            with nullcontext() if number == last else self.way.no_sync():
                loss = self.forward(x, y)
                await self.way.backward(loss * ac.get_world_size() / BATCHES)
            total += loss.item()
        return total

    async def hand_over(self, step: int) -> None:
        state = {name: x.clone() for name, x in self.run.model.state_dict().items()}
        if self.in_background:
            await self.snapshots.put((step, state))
        else:
            with torch.no_grad():
                await self.evaluate(step, state)

    async def evaluate_beside(self) -> None:
        with torch.no_grad():  # for this task only: the other computes gradients between its awaits
            while (snapshot := await self.snapshots.get()) is not None:
                await self.evaluate(*snapshot)

    async def evaluate(self, step: int, state: dict[str, Tensor]) -> None:
        """Compute the loss on held-out text, each rank on its share of the batches."""
        self.judge.load_state_dict(state)
        total = 0.0
        for number in range(ac.get_rank(), EVALUATIONS, ac.get_world_size()):
            x, y = self.corpus.batch(8 * SAMPLES, seed=number, test=True)
            total += await ac.all_reduce(self.judge(x, y).item())
        self.run.evaluations.append((step, total / EVALUATIONS))
        if ac.get_rank() == 0:
            print(f"step {step}: loss {total / EVALUATIONS:.4f} on text that is not trained on", flush=True)


async def main(arguments: argparse.Namespace) -> None:
    ac.initialize()
    if BATCHES % ac.get_world_size():
        raise SystemExit(f"{BATCHES} batches a step cannot be shared by {ac.get_world_size()} ranks alike")
    torch.set_num_threads(1)  # the ranks share this machine
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    corpus = Corpus()
    run = Run(corpus)
    if arguments.checkpoint.exists():
        run.load(arguments.checkpoint)
    training = Training(corpus, run, arguments.way)
    until = min(arguments.until or arguments.steps, arguments.steps)
    async with ac.create_task_group() as tasks:
        tasks.start_soon(training.train, until, arguments.steps, name="training")
        tasks.start_soon(training.evaluate_beside, name="evaluation")
    state = await training.way.state()
    if ac.get_rank() == 0:
        run.save(arguments.checkpoint, state)
        print(f"{until} steps, in {arguments.checkpoint.resolve()}")
    ac.finalize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT, in one go or in several.")
    parser.add_argument("--way", choices=WAYS, default="overlapped", help="who averages the gradients")
    parser.add_argument("--steps", type=int, default=300, help="of the whole training")
    parser.add_argument("--until", type=int, help="stop after this step")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("build/gpt.pt"),
        help="resumed from if it exists, and written at the end",
    )
    asyncio.run(main(parser.parse_args()))

"""Training programs to combine: models, loops, optimizers, and what averages the gradients.

A program is drawn from tables, run by every rank on its own data, and once more by one process on the data
of all. Both must come to the same parameters, which is all that is ever asserted. Nothing here knows how
gradients are averaged: a helper is a row of `HELPERS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import asynccoll as ac
from asynccoll.auto import optim_for
from asynccoll.autoplace import here
from overlapping import SMALL

STEPS = 3

# ---------------------------------------------------------------- models


class Small(nn.Module):
    """A model on rows of six numbers: `loss(x)` is a scalar."""

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def at(self, step: int) -> None:
        """Called before each step."""


class Stack(Small):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Reused(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(checkpoint(self.layer, x, use_reentrant=False).tanh())


class Unused(Small):
    """One head that nobody uses, and one that only some inputs do."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        trunk = self.trunk(x).tanh()
        out = self.heads[0](trunk)
        return out + self.heads[1](trunk) if x[0, 0] > 0 else out


class Thawed(Small):
    """A layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.first.requires_grad_(False)

    def at(self, step: int) -> None:
        self.first.requires_grad_(step > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Shapes(Small):
    """Parameters that are scalar, empty, transposed and of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3, 0))
        self.transposed = nn.Parameter(torch.ones(4, 6).t())
        self.single = nn.Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed) * self.scalar + self.single.to(x.dtype) + self.empty.sum()


class Complex(Small):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(self.weight.dtype) @ self.weight).tanh()


class Picture(Small):
    """Convolutions in channels_last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x[:, :, None, None].expand(-1, -1, 3, 3).reshape(-1, 2, 3, 9)
        return self.second(self.first(pictures).tanh())


class Recurrent(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(len(x), 2, 3))[0]


class Attentive(Small):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


MODELS: dict[str, Callable[[], Small]] = {
    "plain": lambda: Stack(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    "tied": Tied,
    "reused, checkpointed": Reused,
    "unused": Unused,
    "thawed": Thawed,
    "shapes": Shapes,
    "complex": Complex,
    "channels_last": Picture,
    "weight_norm": lambda: Stack(weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)),
    "LSTM": Recurrent,
    "attention": Attentive,
    "batch norm": lambda: Stack(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)),
    "bfloat16": lambda: Stack(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
}


def made(name: str, seed: int) -> Small:
    """The model with numbers of this seed, where all ranks may share torch's generator."""
    model = MODELS[name]().double()
    if name == "shapes":
        model.single.data = model.single.data.float()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
        parameter.data.copy_(values)
    return model.bfloat16() if name == "bfloat16" else model


def rows(rank: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + part)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "SGD foreach": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "Adam foreach": lambda given: torch.optim.Adam(given, lr=0.05, foreach=True),
    "Adam fused": lambda given: torch.optim.Adam(given, lr=0.05, fused=True),
    "Adagrad fused": lambda given: torch.optim.Adagrad(given, lr=0.05, fused=True),
}

# ---------------------------------------------------------------- what averages the gradients


class Helper:
    """One process: nothing to average. Others say what they do differently."""

    #: what the loss is multiplied by before backward
    scale = 1.0

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        self.model, self.optimizer = model, optimizer

    def loss(self, x: Tensor) -> Tensor:
        return self.model.loss(x)

    async def reduced(self) -> None:
        """After each backward, and before gradients are read."""

    async def step(self, step: Callable[[], Any]) -> None:
        step()

    async def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    async def unscale(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)

    async def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        await self.step(lambda: scaler.step(self.optimizer))

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass


class Overlapped(Helper):
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.gradients = ac.overlap_gradients(model, lane=lane, **SMALL, **self.options)
        self.no_sync = self.gradients.no_sync  # type: ignore[method-assign]
        self.close = self.gradients.close  # type: ignore[method-assign]

    async def reduced(self) -> None:
        await self.gradients


class Summed(Overlapped):
    options: ClassVar[dict[str, Any]] = {"op": "sum"}

    @property
    def scale(self) -> float:  # type: ignore[override]
        return 1 / ac.get_world_size()


class Auto(Helper):
    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        place = here() if here().backend != "gloo" else replace(here(), backend="mpi")
        optim_for(place, optimizer, {"lane": lane, **SMALL})
        self.no_sync = getattr(optimizer, "no_sync", self.no_sync)  # type: ignore[method-assign]


class Awaited(Helper):
    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.own = ac.async_optim(optimizer, lane=lane, **SMALL)
        self.no_sync = self.own.no_sync  # type: ignore[method-assign]
        self.close = self.own.close  # type: ignore[method-assign]

    async def reduced(self) -> None:
        await self.own.reduced()

    async def step(self, step: Callable[[], Any]) -> None:
        await self.own.reduced()
        step()
        self.own.gradients.stepped()


class Hooked(Helper):
    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.ddp = DistributedDataParallel(model, find_unused_parameters=True)
        self.ddp.register_comm_hook(ac.overlap.DDPState(lane=lane), ac.overlap.ddp_hook)
        self.no_sync = self.ddp.no_sync  # type: ignore[method-assign]

    def loss(self, x: Tensor) -> Tensor:
        return self.ddp(x).square().mean()


class Averaged(Helper):
    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        ac.overlap.broadcast_parameters(model).wait()
        self.averaging = ac.overlap.average_parameters(model, every=1, lane=lane)

    async def step(self, step: Callable[[], Any]) -> None:
        step()
        await self.averaging


class Sharded(Helper):
    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.own = ac.overlap.shard_optimizer(model, optimizer, lane=lane, **SMALL)
        self.optimizer = self.own
        self.no_sync = self.own.no_sync  # type: ignore[method-assign]
        self.close = self.own.close  # type: ignore[method-assign]
        self.reduced = self.own.reduced  # type: ignore[method-assign]
        self.clip = self.own.clip_grad_norm_  # type: ignore[assignment, method-assign]
        self.unscale = self.own.unscale_  # type: ignore[method-assign]

    async def step(self, step: Callable[[], Any]) -> None:
        await self.own.step()

    async def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        await self.own.step(scaler=scaler)


class Layered(Helper):
    """Of a `Stack`: each layer with what follows it and has no parameters."""

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        assert isinstance(model, Stack)
        ac.overlap.broadcast_parameters(model, lane=lane).wait()
        self.parts: list[nn.Module] = []
        for layer in model.layers:
            if any(True for _ in layer.parameters()):
                self.parts.append(nn.Sequential(layer))
            else:
                self.parts[-1].append(layer)  # type: ignore[operator]
        self.layers = ac.overlap.shard_layers(self.parts, lane=lane, reshard_after_forward="1" in lane)
        own = type(optimizer)(self.layers.parameters(), **optimizer.defaults)
        super().__init__(model, own, lane)
        self.clip = self.layers.clip_grad_norm_  # type: ignore[assignment, method-assign]

    @property
    def scale(self) -> float:  # type: ignore[override]
        return 1 / ac.get_world_size()

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def close(self) -> None:
        whole = self.layers.wait_full_state_dict()
        for index, part in enumerate(self.parts):
            for name, parameter in part.named_parameters():
                parameter.data = whole[f"{index}.{name}"]


HELPERS: dict[str, type[Helper]] = {
    "overlap_gradients": Overlapped,
    "overlap_gradients(op='sum')": Summed,
    "auto_optim": Auto,
    "async_optim": Awaited,
    "ddp_hook": Hooked,
    "average_parameters": Averaged,
    "shard_optimizer": Sharded,
    "shard_layers": Layered,
}

# ---------------------------------------------------------------- loops


@dataclass
class Run:
    """One training run: `batch` gives the rows of this process, one tensor for each rank it stands for."""

    helper: Helper
    batch: Callable[[int, int], list[Tensor | None]]
    scaler: torch.amp.GradScaler | None = None
    in_thread: bool = False

    async def backward(self, step: int, part: int = 0, blown: bool = False) -> None:
        """Of the mean loss over the ranks that this process stands for; nothing without data."""
        found = self.batch(step, part)
        losses = [
            self.helper.loss(x) * (torch.inf if blown and rank == 0 else 1) for rank, x in _there(found)
        ]
        if not losses:
            return
        loss = sum(losses[1:], losses[0]) / len(found) * self.helper.scale
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.in_thread:
            await asyncio.to_thread(loss.backward)
        else:
            loss.backward()

    async def step(self) -> None:
        await self.helper.step(self.helper.optimizer.step)


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
        run.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    await run.backward(step, blown=step == 1)
    await run.helper.reduced()
    await run.helper.unscale(run.scaler)
    await run.helper.clip(0.1)
    await run.helper.scaled_step(run.scaler)
    run.scaler.update()


async def without_data(run: Run, step: int) -> None:
    """The last rank has none for the second step; `batch` sees to it."""
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
}

# ---------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """What is trained, and how; `second` is another model that is trained by turns on a lane of its own."""

    model: str
    loop: str
    helper: str
    optimizer: str
    second: str | None = None

    def __str__(self) -> str:
        return ", ".join(str(part) for part in vars(self).values() if part)


def makes_sense(program: Program) -> bool:
    """Whether the parts fit together, by what torch and the helpers promise."""
    models = {program.model, program.second}
    local = program.helper == "average_parameters"
    ddp = program.helper == "ddp_hook"
    if models & {"complex"} and (
        "fused" in program.optimizer or program.loop in {"scaled", "clipped"} or ddp
    ):
        return False
    if models & {"bfloat16"} and program.optimizer != "SGD":
        return False  # its rounding decides the direction of a step of Adam's
    if models & {"shapes"} and ("fused" in program.optimizer or program.loop == "scaled"):
        return False  # of an empty tensor, which torch's kernels refuse
    if local:  # steps of its own: the same only where a step is linear in the gradient
        return program.optimizer == "SGD" and program.loop not in {"clipped", "scaled"}
    if program.helper == "shard_layers":  # of layers in a row, which every rank has to run
        return program.loop != "without data" and all(
            isinstance(MODELS[one](), Stack) for one in models if one
        )
    if program.helper == "shard_optimizer":  # what nobody used has a gradient of zeros, and not None
        return not models & {"thawed"} and (not models & {"unused"} or program.optimizer == "SGD")
    if ddp:
        return program.loop != "without data" and not models & {"thawed", "bfloat16"}
    return True


def drawn(seed: int) -> Program:
    """The program of that seed."""
    source = random.Random(seed)
    while True:
        program = Program(
            *(source.choice(list(table)) for table in (MODELS, LOOPS, HELPERS, OPTIMIZERS)),
            second=source.choice(list(MODELS)) if source.random() < 0.2 else None,
        )
        if makes_sense(program):
            return program


async def trained(
    program: Program, lane: str, mine: list[int], size: int, kind: type[Helper], seed: int
) -> list[Tensor]:
    """The parameters after some steps, in a process that stands for the ranks in `mine`."""
    runs = []
    for index, name in enumerate(filter(None, (program.model, program.second))):
        device = torch.device("cpu") if kind is Helper else ac.device()
        model = made(name, seed).to(device)
        optimizer = OPTIMIZERS[program.optimizer](list(model.parameters()))
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float64

        def batch(
            step: int, part: int, dtype: torch.dtype = dtype, device: torch.device = device
        ) -> list[Tensor | None]:
            found: list[Tensor | None] = []
            for rank in mine:
                idle = program.loop == "without data" and step == 1 and rank == size - 1 and size > 1
                x = None if idle else rows(rank, step, part).to(device, dtype)
                if x is not None:
                    x.rank = rank  # type: ignore[attr-defined]
                found.append(x)
            return found

        runs.append(Run(kind(model, optimizer, f"{lane} {index}"), batch))
    for step in range(STEPS):
        for run in runs:
            run.helper.model.at(step)
            run.helper.optimizer.zero_grad()
            await LOOPS[program.loop](run, step)
    for run in runs:
        run.helper.close()
    return [parameter.detach().cpu() for run in runs for parameter in run.helper.model.parameters()]


def differing(got: list[Tensor], want: list[Tensor]) -> list[str]:
    """Where the parameters are not the same within rounding."""
    loose = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
    return [
        f"parameter {index} by {(x - y).abs().max():.3g}"
        for index, (x, y) in enumerate(zip(got, want, strict=True))
        if x.numel() and not torch.allclose(x, y, rtol=0, atol=loose.get(x.dtype, 1e-6))
    ]

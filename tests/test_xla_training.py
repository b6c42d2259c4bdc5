"""Training on two replicas with overlapped gradients: the same parameters as on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import asynccoll as ac
import needs
import worlds
from ranks import Rank, raising

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)

STEPS, BATCH = 20, 32


def network() -> torch.nn.Module:
    """A network with the same weights everywhere; torch's seed is not used, as it is the process's."""
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8)),
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 10),
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


async def train(me: Rank) -> tuple[list[float], list[list[float]]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32).view(-1, 8, 8) / 16
    labels = torch.tensor(digits.target)
    device = ac.device()
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with ac.overlap_gradients(model, bucket_bytes=16 << 10, first_bucket_bytes=1 << 10) as gradients:
        for step in range(STEPS):
            place = (step * me.size + me.rank) * BATCH
            x, y = pixels[place : place + BATCH].to(device), labels[place : place + BATCH].to(device)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if me.runner == "blocking":
                gradients.wait()
            else:
                await gradients
            optimizer.step()
            if device.type == "xla":
                import torch_xla

                torch_xla.sync()
            losses.append(await me.get(ac.all_reduce(float(loss.detach().cpu()), op="avg")))
    return losses, [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def on_gloo() -> Any:
    """The losses and parameters of two gloo processes, which are the same on both."""
    with worlds.fresh("gloo", 2) as world:
        first, second = world.run(train, timeout=60)
    assert first == second
    return first


@pytest.mark.parametrize("runner", ["asyncio", "blocking"])
def test_digits_with_overlapped_gradients(on_gloo: Any, runner: str) -> None:
    """Every loss and every weight agrees, up to the order of additions."""
    first, second = worlds.world("xla-tpu", 2).run(train, runner=runner, timeout=100)
    assert first == second, "the replicas have different parameters"
    losses, parameters = first
    assert losses[-1] < 0.75 * losses[0], "it does not learn"
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(on_gloo[0]), rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(parameters, on_gloo[1], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-2, atol=1e-3)


def tied(me: Rank) -> None:
    torch.manual_seed(me.rank)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    model[1].weight = model[0].weight
    assert ac.auto_model(model) is model
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 2
    assert model[0].weight.device.type == "xla"


def test_auto_model_keeps_tied_parameters_tied() -> None:
    """Torch moves parameters to XLA module by module, which would split a tied one into two."""
    worlds.world("xla-tpu", 2).run(tied)


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def blocks() -> torch.nn.Sequential:
    """A model that is the same on every rank."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def trained_alone(size: int, takes_part: Any = lambda rank, step: True) -> list[torch.Tensor]:
    """The parameters of one process that has the rows of all ranks."""
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        losses = [model(rows(rank, step)).square().mean() for rank in range(size) if takes_part(rank, step)]
        (sum(losses) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def is_there(rank: int, step: int) -> bool:
    return (rank, step) != (1, 2)


async def sharded(me: Rank) -> None:
    model = blocks().to(ac.device())
    whole = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    small = {"bucket_bytes": 200, "first_bucket_bytes": 100}
    async with ac.overlap.shard_optimizer(model, whole, **small) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            if is_there(me.rank, step):
                model(rows(me.rank, step).to(ac.device())).square().mean().backward()
            norm = await optimizer.clip_grad_norm_(1e9)
            assert norm > 0
            await optimizer.step()
        await optimizer.gathered()
        for ours, theirs in zip(model.parameters(), trained_alone(me.size, is_there), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-4, atol=1e-5)
        model.to(torch.bfloat16)
        with raising(ac.InvalidArgumentError, "has other memory than when the optimizer was sharded"):
            await optimizer.step()


def test_a_sharded_optimizer_on_the_device() -> None:
    """It matches one process, even if a rank has no data in a step; tensors there have no addresses."""
    worlds.world("xla-tpu", 2).run(sharded, timeout=60)


async def in_layers(me: Rank) -> None:
    model = blocks().to(ac.device())
    with raising(ac.InvalidArgumentError, "XLA device have no addresses: leave it out"):
        ac.overlap.shard_layers(model, reshard_after_forward=True)
    layers = ac.overlap.shard_layers(model, ahead=1)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        x = rows(me.rank, step).to(ac.device())
        async for layer in layers:
            x = layer(x)
        (x.square().mean() / me.size).backward()
        optimizer.step()
    state = await layers.full_state_dict()
    for ours, theirs in zip(state.values(), trained_alone(me.size), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_sharded_layers_on_the_device() -> None:
    """They match one process with all data; what backward would have to gather again is refused."""
    worlds.world("xla-tpu", 2).run(in_layers, timeout=60)

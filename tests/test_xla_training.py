"""Training on two replicas with overlapped gradients: the same parameters as on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import asynccoll as ac
import needs
import worlds
from ranks import Rank

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)

STEPS, BATCH = 20, 32


def network() -> torch.nn.Module:
    """The same weights wherever it is made; the seed of torch is the process's, so it is not used."""
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
    """What two gloo processes make of it; the same on both."""
    with worlds.fresh("gloo", 2) as world:
        first, second = world.run(train, timeout=60)
    assert first == second
    return first


@pytest.mark.parametrize("runner", ["asyncio", "blocking"])
def test_digits_with_overlapped_gradients(on_gloo: Any, runner: str) -> None:
    """Loss by loss and weight by weight, up to the order of additions."""
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
    """Torch moves parameters to XLA one module after the other, and would make two of one."""
    worlds.world("xla-tpu", 2).run(tied)

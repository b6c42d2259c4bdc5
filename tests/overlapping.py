"""Shared by the tests of overlap: small models that are the same on every rank, and the expected results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Small enough for several buckets even with these small models.
SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 100}


class Heads(nn.Module):
    """A trunk and three heads; a forward uses only the heads that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        trunk = torch.tanh(self.trunk(x))
        return torch.stack([self.heads[index](trunk) for index in used]).square().mean()


def alike(model: nn.Module) -> nn.Module:
    """Set the same parameters on every rank, even where ranks share torch's generator."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def network() -> nn.Module:
    layers = [nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3)]
    return alike(nn.Sequential(*layers))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def close(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether the tensors are equal, up to the rounding of a sum in another order."""
    if got is None or want is None:
        return got is want
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-7)


def averages(model: nn.Module, size: int, backward: Callable[[nn.Module, int], None]) -> list[Any]:
    """Return the mean over ranks of the gradients, computed locally; None where no rank has one."""
    by_rank = []
    for rank in range(size):
        twin = copy.deepcopy(model)
        twin.zero_grad()
        backward(twin, rank)
        by_rank.append([parameter.grad for parameter in twin.parameters()])
    means: list[Tensor | None] = []
    for gradients in zip(*by_rank, strict=True):
        there = [gradient for gradient in gradients if gradient is not None]
        means.append(sum(there) / size if there else None)  # type: ignore[arg-type]
    return means


def check_gradients(model: nn.Module, want: list[Any]) -> None:
    named = list(model.named_parameters())
    wrong = [n for (n, p), mean in zip(named, want, strict=True) if not close(p.grad, mean)]
    assert not wrong, f"wrong gradients of {wrong}"

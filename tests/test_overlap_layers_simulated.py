"""Sharded layers on simulated ranks: loops that are interrupted, or whose backward runs much later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
from asynccoll.testing import simulate


def blocks(count: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


def rows(rank: int, turn: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * turn + rank))


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def whole_gradients(layers: ac.overlap.ShardedLayers) -> dict[str, Tensor]:
    """Return the gradients of the whole layers by name, on every rank."""
    state = layers.full_state_dict().wait()
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    optimizer.step()
    stepped = layers.full_state_dict().wait()
    return {name: state[name] - stepped[name] for name in state}


def divided(_: Tensor) -> None:
    raise ZeroDivisionError("of this rank alone")


@pytest.mark.parametrize("between", ["no_grad", "unrolled"])
@pytest.mark.parametrize("fault", ["raises", "reaches no layer"])
def test_a_backward_after_many_more_loops(fault: str, between: str) -> None:
    """Regression: only the latest 32 loops were remembered, so peers waited until the timeout."""

    def main(rank: int) -> list[bool]:
        layers = ac.overlap.shard_layers(blocks(2))
        told = []
        for turn in range(3):
            odd = rank == 0 and turn == 0
            x = rows(rank, turn)
            for index, layer in enumerate(layers):
                x = layer(x)
                if odd and index == 0 and fault == "raises":
                    x.register_hook(divided)
            if odd and fault == "reaches no layer":
                x = rows(rank).requires_grad_()
            with torch.set_grad_enabled(between == "unrolled"):
                later = [through(layers, rows(rank)).sum() for _ in range(40)]
            fine = True
            try:
                (x.square().sum() + sum(later)).backward()
            except (ZeroDivisionError, ac.PeerRefusedError):
                fine = False
            del x, later, layer
            told.append(ac.all_reduce(fine, op="and", timeout=100.0).wait())
        return told

    report = simulate(main, world_size=2, loop="none", timeout=300.0)
    report.check()
    for told in report.results.values():
        assert (told[0], told[-1]) == (False, True)

"""Objects bound to certain tensors of one process are not copied: a copy would send the same memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import asynccoll as ac
from asynccoll.testing import simulate


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MADE: dict[str, Callable[[nn.Sequential], object]] = {
    "GradientReducer": ac.overlap_gradients,
    "ParameterChecker": ac.overlap.check_parameters,
    "AsyncOptimizer": lambda model: ac.async_optim(sgd(model)),
    "ShardedOptimizer": lambda model: ac.overlap.shard_optimizer(model, sgd(model)),
    "ShardedLayers": ac.overlap.shard_layers,
    "DDPState": lambda _: ac.overlap.DDPState(),
    "Prepared": lambda model: ac.prepare("all_reduce", like=model[0].weight.detach()),
}


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", MADE)
def test_a_copy_is_refused_by_name(kind: str, copier: Callable[[object], object]) -> None:
    def main(_: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        made = MADE[kind](model)
        with pytest.raises(ac.InvalidArgumentError, match=f"an? {kind} belongs to its [a-z]+ and process"):
            copier(made)

    simulate(main, world_size=2, loop="none").check()


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps, AveragedModel], ids=lambda one: one.__name__)
def test_a_copy_of_a_model_with_sharded_layers_is_refused(copier: Callable[[object], object]) -> None:
    """Regression: the copy was silently empty."""

    def main(_: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        layers = ac.overlap.shard_layers([model[0]])
        with pytest.raises(ac.InvalidArgumentError, match=r"save `await layers.full_state_dict\(\)`"):
            copier(model)
        assert [layer(torch.ones(1, 2)).shape for layer in layers] == [(1, 2)]

    simulate(main, world_size=2, loop="none").check()

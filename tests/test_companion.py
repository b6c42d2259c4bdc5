"""A companion of a model is neither the model nor its optimizer, and raises if it is used as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import asynccoll as ac


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with ac.session("serial"):
        yield


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model().parameters())


BESIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "gradients": (
        lambda: ac.overlap_gradients(model()),
        r"`await gradients` \(or gradients\.wait\(\)\) between backward and the optimizer's step",
    ),
    "averager": (lambda: ac.overlap.average_parameters(model(), every=2), "`await averager`"),
    "checking": (lambda: ac.overlap.check_parameters(model()), "`await checking`"),
}


@pytest.mark.parametrize(("make", "use"), BESIDE.values(), ids=BESIDE)
def test_what_is_taken_for_the_model_says_what_to_call(make: Callable[[], Any], use: str) -> None:
    one = make()
    with pytest.raises(TypeError, match=f"go on calling the model itself; .*{use}") as called:
        one(torch.ones(2))
    assert isinstance(called.value, ac.InvalidCallError)
    for name in ("parameters", "training", "step", "state_dict"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': model and optimizer .*{use}"):
            getattr(one, name)
        assert not hasattr(one, name)
    with pytest.raises(AttributeError, match=r"no attribute 'wiat'$") as misspelt:
        one.wiat  # noqa: B018  # the lookup is what is tested
    assert (misspelt.value.name, misspelt.value.obj) == ("wiat", one)  # Python uses these to suggest `wait`


def test_layers_that_are_shared_out_are_called_in_a_loop() -> None:
    layers = ac.overlap.shard_layers(model())  # type: ignore[arg-type]  # a Sequential is iterable
    with pytest.raises(ac.InvalidCallError, match="async for layer in layers"):
        layers(torch.ones(2))
    with pytest.raises(ac.InvalidCallError, match="async for layer in layers"):
        layers[0]  # type: ignore[index]  # type checkers report this


def test_an_optimizer_is_not_awaited_but_its_step() -> None:
    with ac.async_optim(adam()) as optimizer:
        with pytest.raises(AttributeError, match=r"`await optimizer\.step\(\)`"):
            optimizer.wait()

        async def main() -> None:
            await optimizer  # type: ignore[misc]  # type checkers report this

        with pytest.raises(ac.InvalidCallError, match=r"`await optimizer\.step\(\)`"):
            main().send(None)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "gradients of an optimizer": (
        lambda: ac.overlap_gradients(adam()),  # type: ignore[arg-type]
        r"got an AdamW: pass the model, .*ac\.async_optim\(optimizer\)",
    ),
    "gradients of names": (
        lambda: ac.overlap_gradients(model().named_parameters()),  # type: ignore[arg-type]
        r"got a generator: pass the model itself, or a list of parameters",
    ),
    "gradients of groups": (
        lambda: ac.overlap_gradients(adam().param_groups),  # type: ignore[arg-type]
        "got a list of dict: ",
    ),
    "gradients of one": (lambda: ac.overlap_gradients(torch.ones(2)), "got a Tensor: "),
    "gradients of gradients": (
        lambda: ac.overlap_gradients(ac.overlap_gradients(model())),  # type: ignore[arg-type]
        "the model is not wrapped",
    ),
    "averages of an optimizer": (
        lambda: ac.overlap.average_parameters(adam(), every=1),  # type: ignore[arg-type]
        "got an AdamW: pass the model, ",
    ),
    "checks of an optimizer": (
        lambda: ac.overlap.check_parameters(adam()),  # type: ignore[arg-type]
        "got an AdamW: pass the model, ",
    ),
    "parameters of a state": (
        lambda: ac.overlap.broadcast_parameters(model().state_dict()),  # type: ignore[arg-type]
        "got an OrderedDict: pass the model itself",
    ),
    "an optimizer that is a model": (
        lambda: ac.async_optim(nn.Linear(1, 1)),  # type: ignore[arg-type]
        r"optimizer of async_optim must be a torch.optim.Optimizer, got a Linear: .*ac\.overlap_gradients",
    ),
    "layers that are a model": (
        lambda: ac.overlap.shard_layers(nn.Linear(1, 1)),  # type: ignore[arg-type]
        r"got a Linear: pass those of the model",
    ),
}


@pytest.mark.parametrize(("call", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_model_is_refused_by_name(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ac.InvalidArgumentError, match=told):
        call()

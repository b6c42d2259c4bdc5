"""Sharded layers on simulated ranks: loops that are interrupted, or whose backward runs much later."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
from asynccoll.overlap import gathering
from asynccoll.testing import PCT, RandomWalk, simulate
from overlapping import close
from ranks import raising


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


def test_a_state_of_parts_is_refused() -> None:
    """Regression: it had the parts of one rank, or none, and others loaded them without an error."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.blocks = blocks()

    def main(_: int) -> None:
        model, holder = Model(), Model()
        whole = model.state_dict()
        layers = holder.blocks = ac.overlap.shard_layers(model.blocks)
        for one in (layers, holder, model, model.blocks, model.blocks[1]):
            kind = "a ShardedLayers" if one in (layers, holder) else "a Linear"
            for refused in (one.state_dict, partial(one.load_state_dict, whole, strict=False)):
                with raising(ac.InvalidArgumentError, f"of {kind}", "layers.full_state_dict()"):
                    refused()
        holder.head.load_state_dict(model.head.state_dict())
        state = layers.full_state_dict().wait()
        layers.load_full_state_dict(state)
        blocks().load_state_dict(state)

    simulate(main, world_size=2, loop="none").check()


@pytest.mark.parametrize("at", [0, 2])
def test_a_loop_that_is_interrupted_as_it_gathers(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after Ctrl-C finish_loop() skipped that layer, so the ranks were at different layers."""
    gather = gathering.all_gather

    def main(rank: int) -> list[bool]:
        layers = ac.overlap.shard_layers(blocks())
        told = []
        for turn in range(4):
            interrupts.update({rank: at} if rank == 0 and turn == 1 else {})
            fine = False
            try:
                loss = through(layers, rows(rank, turn)).square().sum()
                fine = True
            except KeyboardInterrupt:
                layers.finish_loop().wait()
            if fine := ac.all_reduce(fine, op="and").wait():
                loss.backward()
            told.append(fine)
        return told

    interrupts: dict[int, int] = {}

    def interrupted(parts: Any, **call: Any) -> Any:
        rank = ac.get_rank()
        if f"layer {interrupts.get(rank)}" in parts:
            del interrupts[rank]
            raise KeyboardInterrupt
        return gather(parts, **call)

    monkeypatch.setattr(gathering, "all_gather", interrupted)
    report = simulate(main, world_size=2, loop="none")
    report.check()
    assert report.results == {rank: [True, False, True, True] for rank in range(2)}


@pytest.mark.parametrize("finishes", ["as it is", "no_grad", "inference_mode"])
def test_loops_that_ranks_leave_at_different_layers(finishes: str) -> None:
    """The rest is gathered in any mode. Regression: in no_grad, ranks expected gradients of other layers."""
    modes = {"as it is": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

    def left(layers: Any, rank: int) -> Tensor:
        x = rows(rank)
        for layer, _ in zip(layers, range(rank + 1), strict=False):
            x = layer(x)
        return x.square().sum()

    def main(rank: int) -> dict[str, Tensor]:
        layers = ac.overlap.shard_layers(blocks())
        loss = left(layers, rank)
        with modes[finishes]():
            layers.finish_loop().wait()
        loss.backward()
        return whole_gradients(layers)

    report = simulate(main, world_size=2, loop="none")
    report.check()
    whole = blocks()
    for rank in range(2):
        left(whole, rank).backward()
    for found in report.results.values():
        for name, x in whole.named_parameters():
            assert close(found[name], torch.zeros_like(x) if x.grad is None else x.grad), name


def test_a_loop_that_begins_without_gradients() -> None:
    """It refuses gradients later. Regression: layers that were in flight by then lost theirs silently."""

    def main(_: int) -> None:
        modules = blocks()
        layers = ac.overlap.shard_layers(modules)
        for frozen in (False, True):
            modules.requires_grad_(not frozen)
            x = rows(0).requires_grad_()
            with torch.no_grad():
                kept = list(layers)
                kept[0](x)
            if frozen:
                through(kept, x).sum().backward()
                assert x.grad is not None
            else:
                with raising(ac.InvalidArgumentError, "layer 1", "began without", "requires_grad_(False)"):
                    kept[1](x)

    simulate(main, world_size=2, loop="none").check()


def test_a_loop_that_calls_only_frozen_layers() -> None:
    """Regression: it was accepted, though its backward reaches none of the layers that peers wait for."""

    def main(_: int) -> None:
        modules = blocks()
        modules[1].requires_grad_(False)
        layers = ac.overlap.shard_layers(modules)
        for called in ([1], [1, 2]):
            x = rows(0).requires_grad_()
            with raising(ac.InvalidArgumentError, "only frozen ones") if called == [1] else nullcontext():
                for index, layer in enumerate(layers):
                    x = layer(x) if index in called else x

    simulate(main, world_size=2, loop="none").check()


def stepped(outputs: list[Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Step if no rank's backward of its only output raises; return whether it did. Empties ``outputs`` first.

    So this rank keeps no graph while it waits for the others.
    """
    fine = True
    try:
        outputs.pop().square().sum().backward()
    except (ZeroDivisionError, ac.PeerRefusedError):
        fine = False
    fine = bool(ac.all_reduce(fine, op="and", timeout=100.0).wait())
    if fine:
        optimizer.step()
    optimizer.zero_grad()
    return fine


@pytest.mark.parametrize("reshard", [False, True])
def test_a_backward_that_raises_before_it_reaches_other_layers(reshard: bool) -> None:
    """The ranks are in step again. Regression: they heard of refused calls one by one, and new ones failed.

    In the first step, when the lane of that backward is not open yet.
    """

    def main(rank: int) -> tuple[list[bool], list[dict[str, Tensor]]]:
        first, second = (
            ac.overlap.shard_layers(blocks(), reshard_after_forward=reshard, lane=name) for name in "ab"
        )
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
        told = []
        for turn in range(3):
            x = through(first, rows(rank, turn))
            if turn == 0 and rank == 0:
                x.register_hook(divided)
            outputs = [through(second, x)]
            del x
            told.append(stepped(outputs, optimizer))
        return told, [one.full_state_dict().wait() for one in (first, second)]

    whole = nn.ModuleList([blocks(), blocks()])
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    for turn in (1, 2):
        for rank in range(3):
            through(whole[1], through(whole[0], rows(rank, turn))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for seed in range(10):
        schedule = PCT() if seed % 2 else RandomWalk()
        report = simulate(main, world_size=3, loop="none", seed=seed, timeout=300.0, schedule=schedule)
        report.check()
        for told, found in report.results.values():
            assert told == [False, True, True]
            for parts, model in zip(found, whole, strict=True):
                assert all(close(parts[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("loops", [1, 2])
def test_a_backward_that_raises_before_it_reaches_a_layer(loops: int, reshard: bool) -> None:
    """The ranks are in step again. Regression: on Python 3.11, ranks that are threads waited for a lock."""

    def main(rank: int) -> tuple[list[bool], dict[str, Tensor]]:
        layers = ac.overlap.shard_layers(blocks(), reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
        told = []
        for turn in range(4):
            outputs = [torch.stack([through(layers, rows(rank, turn)) for _ in range(loops)])]
            if turn == 1 and rank == 0:
                outputs[0].register_hook(divided)
            told.append(stepped(outputs, optimizer))
        return told, layers.full_state_dict().wait()

    whole = blocks()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    for turn in (0, 2, 3):
        sum(loops * through(whole, rows(rank, turn)).square().sum() for rank in range(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for seed in range(10):
        report = simulate(main, world_size=3, loop="none", seed=seed, timeout=300.0)
        report.check()
        for told, found in report.results.values():
            assert told == [True, False, True, True]
            assert all(close(found[name], x) for name, x in whole.state_dict().items())


@pytest.mark.parametrize("told", ["has a hook", "'bias' of layer 0 was frozen"])
def test_a_loop_that_one_rank_refuses(told: str) -> None:
    """The others get its reason, and the ranks go on together. Regression: they waited until the timeout."""

    def main(rank: int) -> dict[str, Tensor]:
        modules = blocks()
        layers = ac.overlap.shard_layers(modules)
        hook = next(layers.parameters()).register_hook(lambda _: None)
        if rank != 1 or told != "has a hook":
            hook.remove()
        modules[0].bias.requires_grad_(rank != 1 or told == "has a hook")
        with raising(ac.InvalidArgumentError if rank == 1 else ac.PeerRefusedError, told):
            through(layers, rows(rank))
        layers.finish_loop().wait()
        hook.remove()
        modules.requires_grad_(True)
        through(layers, rows(rank)).square().sum().backward()
        return whole_gradients(layers)

    whole = blocks()
    sum(through(whole, rows(rank)).square().sum() for rank in range(3)).backward()
    for seed in range(3):
        report = simulate(main, world_size=3, loop="none", seed=seed, operation_timeout=100.0)
        report.check()
        for found in report.results.values():
            assert all(close(found[name], x.grad) for name, x in whole.named_parameters())


def test_a_rank_may_have_parameters_of_its_own_in_the_optimizer() -> None:
    """Regression: the groups behind these had other numbers, which were taken for other hyperparameters."""

    def main(rank: int) -> dict[str, Tensor]:
        layers = ac.overlap.shard_layers(blocks())
        own = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5}] if rank == 1 else []
        optimizer = torch.optim.SGD([*own, {"params": list(layers.parameters())}], lr=0.1)
        for turn in range(2):
            through(layers, rows(rank, turn)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(layers.full_state_dict().wait())

    whole = blocks()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for turn in range(2):
        sum(through(whole, rows(rank, turn)).square().sum() for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = simulate(main, world_size=2, loop="none")
    report.check()
    for found in report.results.values():
        assert all(close(found[name], x) for name, x in whole.state_dict().items())

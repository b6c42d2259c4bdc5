"""A sharded optimizer: same parameters as the whole optimizer on averaged gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
import oracle
from asynccoll.overlap.elementwise import check_elementwise
from asynccoll.overlap.states import loaded
from asynccoll.overlap.steps import Steps
from overlapping import SMALL, Heads, alike, batch, close, loss_of, network, rows
from ranks import Rank, raising
from worlds import World


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "weight" not in name], "lr": 0.05},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "parameter groups": lambda model: torch.optim.AdamW(parameter_groups(model), lr=0.01),
}


def same_parameters(me: Rank, ours: nn.Module, twin: nn.Module, exact: bool = True) -> None:
    for mine, its in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-5)
        if exact and me.size <= 2:  # a sum of two does not depend on its order
            oracle.same(mine.detach(), its.detach())


def average(model: nn.Module) -> None:
    """Average the blocking twin's gradients; a gradient that no rank has counts as zeros."""
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = ac.all_reduce(gradient, op="avg").wait()


async def step(me: Rank, optimizer: ac.overlap.ShardedOptimizer) -> None:
    if me.runner == "blocking":
        optimizer.step().wait()
    else:
        await optimizer.step()


async def both_step(
    me: Rank,
    optimizer: ac.overlap.ShardedOptimizer,
    whole: torch.optim.Optimizer,
    ours: nn.Module,
    twin: nn.Module,
    loss: Callable[[nn.Module], Tensor],
) -> None:
    """Take one step of the sharded optimizer, and one of its blocking twin."""
    optimizer.zero_grad()
    loss(ours).backward()
    await step(me, optimizer)
    whole.zero_grad()
    loss(twin).backward()
    average(twin)
    whole.step()


async def gathered(me: Rank, optimizer: ac.overlap.ShardedOptimizer) -> None:
    if me.runner == "blocking":
        optimizer.gathered().wait()
    else:
        await optimizer.gathered()


async def against_whole(me: Rank, name: str) -> None:
    ours, twin = network(), network()
    whole = OPTIMIZERS[name](twin)
    with ac.overlap.shard_optimizer(ours, OPTIMIZERS[name](ours), **SMALL) as optimizer:
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer.wrapped, whole)]
        for turn in range(5):
            optimizer.zero_grad(set_to_none=turn % 2 == 0)
            with optimizer.no_sync():
                loss_of(ours, batch(me.rank, turn)).backward()
            loss_of(ours, batch(me.rank, turn + 10)).backward()
            await step(me, optimizer)

            whole.zero_grad()
            for part in (0, 10):
                loss_of(twin, batch(me.rank, turn + part)).backward()
            average(twin)
            whole.step()
            for scheduler in schedulers:
                scheduler.step()
        state = sum(x.numel() for kept in optimizer.state.values() for x in kept.values())
        whole_state = sum(x.numel() for kept in whole.state.values() for x in kept.values())
        assert state <= whole_state / me.size + 100, "each rank keeps its part of the state"
    same_parameters(me, ours, twin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_the_whole_optimizer(world: World, runner: str, name: str) -> None:
    """With accumulation and a scheduler, parameters are equal bit for bit on one and two ranks."""
    if name != "AdamW" and runner == "trio":
        runner = "asyncio"
    world.run(against_whole, name, runner=runner)


async def clipped(me: Rank) -> None:
    ours, twin = network(), network()
    whole = torch.optim.SGD(twin.parameters(), lr=0.1)
    with ac.overlap.shard_optimizer(ours, torch.optim.SGD(ours.parameters(), lr=0.1), **SMALL) as optimizer:
        for turn in range(3):
            optimizer.zero_grad()
            loss_of(ours, batch(me.rank, turn)).backward()
            norm = await optimizer.clip_grad_norm_(0.01)
            await optimizer.step()

            whole.zero_grad()
            loss_of(twin, batch(me.rank, turn)).backward()
            average(twin)
            assert close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.01))
            whole.step()
    same_parameters(me, ours, twin, exact=False)


def test_clipping_by_the_norm_of_all_ranks(world: World) -> None:
    world.run(clipped, runner="asyncio")


async def clipped_at_length(me: Rank) -> None:
    model = nn.Linear(1024, 1024 * me.size, bias=False)
    values = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(1))
    with ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        await optimizer.gathered()
        (model.weight * values).sum().backward()
        norm = await optimizer.clip_grad_norm_(1.0)
    expected = values.double().norm()
    assert abs(norm.double() - expected) <= 1e-6 * expected


def test_the_norm_of_long_parts(world: World) -> None:
    """Each rank has a million elements, for which torch's own norm in float32 is off by 1e-5."""
    world.run(clipped_at_length, runner="asyncio")


async def scaled(me: Rank) -> None:
    ours, twin = network(), network()
    whole = torch.optim.SGD(twin.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in range(2)]
    with ac.overlap.shard_optimizer(ours, torch.optim.SGD(ours.parameters(), lr=0.1), **SMALL) as optimizer:
        for turn in range(4):
            x = batch(me.rank, turn)
            if turn == 1 and me.rank == 0:
                x = torch.full_like(x, torch.inf)  # on one rank, but in every rank's shard
            optimizer.zero_grad()
            scalers[0].scale(loss_of(ours, x)).backward()
            await optimizer.clip_grad_norm_(0.01 * scalers[0].get_scale())
            scalers[0].step(optimizer.wrapped)
            scalers[0].update()
            optimizer.gather()

            whole.zero_grad()
            scalers[1].scale(loss_of(twin, x)).backward()
            average(twin)
            scalers[1].unscale_(whole)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
            scalers[1].step(whole)
            scalers[1].update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
    same_parameters(me, ours, twin, exact=False)


def test_a_gradient_scaler_skips_on_all_ranks(world: World) -> None:
    """An overflow on one rank is noticed on ranks whose shards are finite."""
    world.run(scaled, runner="asyncio")


async def mixed(me: Rank) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = alike(Heads())
        model.trunk.bfloat16()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def loss(model: nn.Module, turn: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows(me.rank, turn), [0, 1] if me.rank else [0])

    (ours, own), (twin, whole) = make(), make()
    with ac.overlap.shard_optimizer(ours, own, **SMALL) as optimizer:
        for turn in range(3):
            await both_step(me, optimizer, whole, ours, twin, partial(loss, turn=turn))
    for mine, its in zip(ours.parameters(), twin.parameters(), strict=True):
        assert mine.dtype is its.dtype
        assert torch.allclose(mine, its, rtol=2e-2, atol=1e-3)


def test_dtypes_autocast_and_unused_parameters(world: World) -> None:
    """Layers have bfloat16 or float32; a gradient that a rank lacks counts as zeros."""
    world.run(mixed, runner="asyncio")


async def waits_in_forward(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    alike(model)
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **SMALL)
    with optimizer, ac.trace.recording() as timeline:
        model(torch.ones(2, 8)).sum().backward()
        await step(me, optimizer)
        out = [bucket.arrival.work is not None for bucket in optimizer.gradients.buckets]
        assert out == [True] * 3, "the step has started to send, and waits for nothing"
        model[0](torch.ones(2, 8))
        out = [bucket.arrival.work is not None for bucket in optimizer.gradients.buckets]
        assert out == [True, True, False], "the first layer has waited for its own parameters alone"
        await gathered(me, optimizer)
    names = [span.name for span in timeline.spans if span.is_operation]
    assert names == ["reduce_scatter"] * 3 + ["all_gather"] * 4, "one small one, to compare the steps"


def test_each_forward_waits_for_its_own_parameters(pair: World, runner: str) -> None:
    pair.run(waits_in_forward, runner=runner)


async def used_elsewhere(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    alike(model)
    with ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        model(torch.ones(1, 4)).sum().backward()
        await step(me, optimizer)
        with raising(ac.InvalidArgumentError, "[4]", "gathered()"):
            nn.functional.linear(torch.ones(1, 4), model[0].weight, model[0].bias).sum().backward()
        await gathered(me, optimizer)
        nn.functional.linear(torch.ones(1, 4), model[0].weight, model[0].bias).sum().backward()
        await step(me, optimizer)


def test_a_parameter_that_nobody_waited_for(pair: World, runner: str) -> None:
    """Used outside its module's forward, it is refused instead of silently being half of the last step's."""
    pair.run(used_elsewhere, runner=runner)


class Late(nn.Module):
    """Reads one layer's weight directly, then calls another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(nn.functional.linear(x, self.read.weight))


async def waited_for_too_late(me: Rank) -> None:
    model = Late()
    alike(model)
    with ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        assert len(optimizer.gradients.buckets) == 1
        model(torch.ones(1, 4)).sum().backward()
        await step(me, optimizer)
        with raising(ac.InvalidArgumentError, "[4, 4]", "gathered()"):
            model(torch.ones(1, 4)).sum().backward()
        await gathered(me, optimizer)


def test_a_parameter_that_is_read_before_its_bucket_is_waited_for(pair: World, runner: str) -> None:
    """It is refused even if another module waits for the same bucket afterwards."""
    pair.run(waited_for_too_late, runner=runner)


async def compared_at_once(me: Rank) -> None:
    model = network()
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **SMALL)
    for turn in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(me.rank, turn)).backward()
        await optimizer.step()
        await ac.overlap.check_parameters(model if turn else model.parameters())
        await ac.overlap.broadcast_parameters(model)
    await optimizer.aclose()


def test_parameters_that_are_compared_after_a_step(pair: World) -> None:
    """They are waited for. Regression: ranks with only their shards of the step seemed to have diverged."""
    pair.run(compared_at_once)


async def written_too_early(me: Rank) -> None:
    model = network()
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), **SMALL)
    for turn in range(2):
        loss_of(model, batch(me.rank, turn)).backward()
        await optimizer.step()
        if turn:
            await optimizer.gathered()
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
        refused = raising(ac.InvalidArgumentError, "[4, 1, 3] was written to before", "gathered()")
        with contextlib.nullcontext() if turn else refused:
            loss_of(model, batch(me.rank, turn))
    await optimizer.aclose()


def test_a_parameter_that_is_written_to_before_it_is_there(pair: World) -> None:
    """The next forward refuses. Regression: the gathered values silently overwrote all or part of it."""
    pair.run(written_too_early)


def transformer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = alike(nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


async def attending(me: Rank, bucket_bytes: int) -> None:
    (ours, own), (twin, whole) = transformer(), transformer()
    sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
    with ac.overlap.shard_optimizer(ours, own, **sizes) as optimizer:
        buckets = optimizer.gradients.buckets
        assert len(buckets) > 1

        def in_attention(*_: object) -> None:
            read = {id(x) for x in ours.self_attn.parameters()}
            for bucket in buckets:
                assert bucket.arrival.work is None or not read & {id(x) for x in bucket.parameters}

        ours.self_attn.register_forward_pre_hook(in_attention)
        for turn in range(3):
            await both_step(me, optimizer, whole, ours, twin, partial(loss_of, x=batch(me.rank, turn)))
    same_parameters(me, ours, twin)


@pytest.mark.parametrize("bucket_bytes", [1, 700], ids=["apart", "shared"])
def test_attention_waits_for_its_output_projection(pair: World, bucket_bytes: int) -> None:
    """Attention reads the projection's weight without calling the module."""
    pair.run(attending, bucket_bytes, runner="asyncio")


@pytest.mark.parametrize("first", [torch.tensor(2.0), torch.full((2,), 1 + 1j)], ids=["0-d", "complex"])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
def test_a_state_of_a_first_parameter_of_another_kind(kind: Any, first: Tensor) -> None:
    """The check tries such a state. Regression: a single number was taken for elementwise, and refused."""
    model = nn.Linear(3, 2)
    model.first = nn.Parameter(first)
    optimizer = kind(sorted(model.parameters(), key=lambda x: x is not model.first))
    (model(torch.ones(1, 3)).sum() * model.first.abs().sum()).backward()
    optimizer.step()
    before = optimizer.state_dict()["state"]
    with ac.overlap.shard_optimizer(model, optimizer) as sharded:
        after = sharded.full_state_dict().wait()["state"]
    for number, state in before.items():
        for name, value in state.items():
            oracle.same(after[number][name], value)


def test_a_rank_that_is_alone_compares_its_steps_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which costs time for each hyperparameter and state in every step."""
    compared = Mock(return_value="")
    monkeypatch.setattr(ac.overlap.ShardedOptimizer, "_followed", compared)
    model = nn.Linear(2, 1)
    with ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0)) as optimizer:
        model(torch.ones(2)).sum().backward()
        before = model.bias - 1
        optimizer.step().wait()
    assert close(model.bias, before)
    assert not compared.called


def test_a_parameter_that_is_first_used_after_resuming() -> None:
    """It begins as without sharding. Regression: Rprop began with steps of a millionth."""
    saved, resumed, twin = (nn.ParameterList([torch.ones(3), torch.ones(2)]) for _ in range(3))
    first = torch.optim.Rprop(saved.parameters(), lr=0.25)
    saved[0].square().sum().backward()
    first.step()
    whole = torch.optim.Rprop(twin.parameters())
    whole.load_state_dict(first.state_dict())
    other = torch.optim.Rprop(resumed.parameters())
    with ac.overlap.shard_optimizer(resumed, other, init_sync=False) as optimizer:
        optimizer.load_full_state_dict(first.state_dict())
        for _ in range(2):
            optimizer.zero_grad()
            whole.zero_grad()
            for model in (resumed, twin):
                (model[0].square().sum() + model[1].square().sum()).backward()
            optimizer.step().wait()
            whole.step()
            optimizer.gathered().wait()
    for mine, its in zip(resumed, twin, strict=True):
        assert close(mine, its)


def test_gradients_zeroed_by_data() -> None:
    """`.data` bumps no version. Regression: the next gradients were added to the old ones."""
    model, whole = network(), network()
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD(whole.parameters(), lr=0.1)
    for turn in range(3):
        with optimizer.no_sync():  # a gradient of zeros must not pass for one that was zeroed
            (model(batch(0, turn)).sum() * 0).backward()
        model(batch(0, turn)).square().mean().backward()
        whole(batch(0, turn)).square().mean().backward()
        optimizer.step().wait()
        other.step()
        optimizer.gathered().wait()
        for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
            assert close(mine, its)
            if turn < 1:  # afterwards they accumulate
                assert mine.grad is not None and its.grad is not None
                mine.grad.data.zero_()
                its.grad.data.zero_()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.neg_()
    with raising(ac.InvalidArgumentError, "was written to after it had been reduced"):
        model(batch(0, 0)).square().mean().backward()


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer that a scheduler wraps. Regression: trying out a copy of it stepped this one."""
    optimizer = torch.optim.Adafactor(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def twice(model: nn.Module) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.optim.SGD([*model.parameters(), *model.parameters()], lr=0.1)


class Scaled(torch.optim.Optimizer):
    """An optimizer whose steps are scaled by a norm."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        for group in self.param_groups:
            of_all = torch.cat([x.grad.reshape(-1) for x in group["params"] if x.grad is not None])
            for x in group["params"]:
                if x.grad is not None:
                    x.sub_(self.change(x, x.grad, of_all), alpha=group["lr"])

    def change(self, x: Tensor, gradient: Tensor, of_all: Tensor) -> Tensor:
        raise NotImplementedError


class Lars(Scaled):
    def change(self, x: Tensor, gradient: Tensor, of_all: Tensor) -> Tensor:
        return gradient * 0.001 * x.norm() / gradient.norm()


class Lamb(Scaled):
    def change(self, x: Tensor, gradient: Tensor, of_all: Tensor) -> Tensor:
        update = gradient / (gradient.abs() + 1e-6) + 0.01 * x
        return update * x.norm() / update.norm()


class Clipped(Scaled):
    def change(self, x: Tensor, gradient: Tensor, of_all: Tensor) -> Tensor:
        return gradient / of_all.norm().clamp(min=1.0)


class Kept(Scaled):
    """An optimizer with float32 state, as is usual for bfloat16 parameters."""

    def change(self, x: Tensor, gradient: Tensor, of_all: Tensor) -> Tensor:
        mean: Tensor = self.state[x].setdefault("mean", torch.zeros_like(x, dtype=torch.float32))
        return mean.lerp_(gradient, 0.5) * self.scale(x)

    def scale(self, x: Tensor) -> Tensor | float:
        return 1.0


class KeptLars(Kept):
    def scale(self, x: Tensor) -> Tensor | float:
        return 0.001 * x.norm()


class Mu(Kept):
    """An optimizer that calls its momentum what NAdam and ASGD call a number."""

    def change(self, x: Tensor, gradient: Tensor, of_all: Tensor) -> Tensor:
        mean: Tensor = self.state[x].setdefault("mu", torch.zeros_like(x))
        return mean.lerp_(gradient, 0.5)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.layers = nn.Parameter(torch.tensor(2.0)), network()

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layers(x)


async def carried_over(me: Rank) -> None:
    twin = Scalar()
    whole, saved = Mu(twin.parameters(), lr=0.1), None
    for turn in range(2):
        ours = copy.deepcopy(twin)
        with ac.overlap.shard_optimizer(ours, Mu(ours.parameters(), lr=0.1)) as optimizer:
            if saved is not None:
                optimizer.load_full_state_dict(saved)
            await both_step(me, optimizer, whole, ours, twin, partial(loss_of, x=batch(me.rank, turn)))
            saved = await optimizer.full_state_dict()
        same_parameters(me, ours, twin)
        for number, x in enumerate(twin.parameters()):
            assert close(saved["state"][number]["mu"], whole.state[x]["mu"])


def test_a_vector_of_a_name_that_torch_gives_a_number(several: World) -> None:
    """Regression: the saved momentum of each parameter was that of this rank's part of all of them."""
    several.run(carried_over, runner="asyncio")


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "foreign": (lambda _: torch.optim.SGD(network().parameters(), lr=0.1), "not in the model"),
    "empty": (lambda _: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "not in the model"),
    "twice": (twice, "has a parameter twice"),
    "Adafactor": (lambda model: torch.optim.Adafactor(model.parameters()), "Adafactor is not elementwise"),
    "Adafactor, scheduled": (scheduled, "Adafactor is not elementwise"),
    "Adafactor, slow": (
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-5),
        "Adafactor is not elementwise",
    ),
    "LARS": (lambda model: Lars(model.parameters(), lr=1e-3), "Lars is not elementwise"),
    "LARS, float32": (lambda model: KeptLars(model.parameters(), lr=1e-3), "KeptLars is not elementwise"),
    "LAMB": (lambda model: Lamb(model.parameters(), lr=1e-5), "Lamb is not elementwise"),
    "LAMB, at rest": (lambda model: Lamb(model.parameters(), lr=0.0), "Lamb is not elementwise"),
    "clips": (lambda model: Clipped(model.parameters(), lr=0.1), "Clipped is not elementwise"),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot be sharded"),
    "Muon": (
        lambda model: torch.optim.Muon([x for x in model.parameters() if x.dim() == 2]),
        "Muon cannot be",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """The call is refused before anything is sent or taken over."""
    make, says = REFUSED[name]
    model = network()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ac.InvalidArgumentError, match=says):
        ac.overlap.shard_optimizer(model, make(model))
    with pytest.raises(ac.InvalidArgumentError, match="takes the module"):
        ac.overlap.shard_optimizer(list(model.parameters()), make(model))  # type: ignore[arg-type]
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_sparse_gradients_are_refused_unless_they_are_left_out() -> None:
    """Regression: the first backward refused them, after the parameters were taken over."""
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2))
    with raising(ac.InvalidArgumentError, "of shape [3, 2]", "sparse=True"):
        ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rest = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with ac.overlap.shard_optimizer(model, rest) as optimizer:
        model(torch.tensor([0])).sum().backward()
        optimizer.step().wait()
    assert model[0].weight.grad.is_sparse


@pytest.mark.parametrize("wrapped", [False, True])
def test_its_parts_are_refused_where_their_gradients_would_be_reduced_again(wrapped: bool) -> None:
    """Regression: each rank's part was averaged with other ranks' parts, which are of other parameters."""
    model = network()
    with ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        with pytest.raises(ac.InvalidArgumentError, match="or of a sharded optimizer"):
            ac.async_optim(optimizer.wrapped if wrapped else optimizer)  # type: ignore[arg-type]
        with pytest.raises(ac.InvalidArgumentError, match="or of a sharded optimizer"):
            ac.overlap.average_parameters(optimizer.wrapped.param_groups[0]["params"], every=1)


ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Adagrad",
    "Adadelta",
    "ASGD",
)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_taken(name: str, options: dict[str, bool]) -> None:
    """They are accepted whatever their rate, and whether or not they have stepped before."""
    for lr in (0.0, 1e-6, 1.0):
        model = nn.Linear(3, 2)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, **options)
        for _ in range(2):
            check_elementwise(optimizer)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_saved_state_is_moved_to_its_parameter_as_torch_moves_it(options: dict[str, bool]) -> None:
    """This includes numbers that are not elementwise, such as step counts kept on the device."""
    parameter = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"))
    state = {"step": torch.tensor(3), "sum": torch.ones(2), "mu": torch.tensor(0.5), "eta": 0.1}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= options
    optimizer.load_state_dict({**saved, "state": {0: state}})
    ours, theirs = loaded(state, parameter, options), optimizer.state[parameter]
    assert [*ours] == [*theirs] == [*state]
    assert _kinds(ours) == _kinds(theirs)


@pytest.mark.parametrize("of_one", [torch.ones(3), torch.tensor(1.0), torch.ones(1, 4)])
def test_a_state_of_another_model_is_refused(of_one: Tensor) -> None:
    """By the name of its parameter, with both shapes; some of them would fit by being repeated."""
    model = nn.Linear(4, 2)
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.Adagrad(model.parameters()), lane="another")
    saved = optimizer.full_state_dict().wait()
    saved["state"][0]["sum"] = of_one  # type: ignore[index]
    before = optimizer.wrapped.state
    with raising(ac.InvalidArgumentError, "'sum' of the parameter 'weight' of shape [2, 4] has shape"):
        optimizer.load_full_state_dict(saved)
    assert optimizer.wrapped.state is before
    optimizer.close()


def _kinds(state: dict[str, Any]) -> dict[str, object]:
    return {name: (x.device, x.dtype) if isinstance(x, Tensor) else x for name, x in state.items()}


def test_elementwise_optimizers_with_a_state_of_float32_are_taken() -> None:
    check_elementwise(Kept(nn.Linear(3, 2).parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("error", "is_left"),
    [
        (ac.PeerLostError("rank 1 is gone"), False),
        (ac.CollectiveTimeoutError("late", pending=True), True),
        (ac.CollectiveTimeoutError("the backend timed out"), False),
    ],
)
def test_a_close_that_fails_removes_the_hooks(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_left: bool
) -> None:
    """Another optimizer can be made of the model; only if a wait timed out, something is left to wait for."""

    def lost() -> Steps[None]:
        raise error
        yield

    model = nn.Linear(2, 2)
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with monkeypatch.context() as patched:
        patched.setattr(optimizer.gradients, "gathered", lost)
        with pytest.raises(type(error)):
            optimizer.close()
    assert bool(model._forward_pre_hooks) == bool(model.weight._backward_hooks) == is_left
    optimizer.close()
    assert not model._forward_pre_hooks

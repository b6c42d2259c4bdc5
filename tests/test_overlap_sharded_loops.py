"""A sharded optimizer in realistic loops: same results as one process that sees all data."""

from __future__ import annotations

import copy
import gc
import linecache
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
import oracle
from overlapping import SMALL, alike, batch, close, loss_of, network
from patience import patient
from ranks import Rank, raising
from worlds import World

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def on_all_data(model: nn.Module, size: int, turn: int, loss: Callable[..., Tensor] = loss_of) -> None:
    """Run backward for the mean of all ranks' losses in one process."""
    for rank in range(size):
        (loss(model, batch(rank, turn)) / size).backward()


def same(ours: nn.Module, twin: nn.Module) -> None:
    for (name, mine), its in zip(ours.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-5), f"{name}: {mine} instead of {its}"


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(8, 6)), nn.Tanh(), norm(nn.Linear(6, 3)))


NORMS = {
    "weight_norm by hook": nn.utils.weight_norm,
    "spectral_norm by hook": nn.utils.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
}


async def with_hooks(me: Rank, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # weight_norm by hook is deprecated, but in use
        ours, twin = normed(NORMS[name]), normed(NORMS[name])
    whole = sgd(twin.parameters())
    with ac.overlap.shard_optimizer(ours, sgd(ours.parameters()), **SMALL) as optimizer:
        for turn in range(3):
            optimizer.zero_grad()
            loss_of(ours, batch(0, turn)).backward()  # the same data on all ranks: a hook counts forwards
            await optimizer.step()
            whole.zero_grad()
            loss_of(twin, batch(0, turn)).backward()
            whole.step()
        got = ours(batch(0, 9))  # its hooks, too, read the parameters that the step sent
    assert torch.allclose(got, twin(batch(0, 9)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_hooks_that_read_parameters(pair: World, name: str) -> None:
    """They see the last step's parameters, not values in flight."""
    pair.run(with_hooks, name, runner="asyncio")


async def read_too_early(me: Rank) -> None:
    model = alike(nn.Sequential(nn.Linear(4, 4)))
    seen: list[Tensor] = []
    with ac.overlap.shard_optimizer(model, sgd(model.parameters())) as optimizer:
        model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight**2), prepend=True)
        model(torch.ones(1, 4)).sum().backward()
        await optimizer.step()
        model(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            seen[-1].sum().backward()


def test_a_hook_that_reads_before_ours(pair: World) -> None:
    """Autograd refuses, because the values it read have changed since."""
    pair.run(read_too_early, runner="asyncio")


async def compiled(me: Rank, before: bool) -> None:
    ours, twin = normed(lambda layer: layer), normed(lambda layer: layer)
    whole = sgd(twin.parameters())
    forward = torch.compile(ours, backend="eager")
    if before:
        forward(batch(me.rank, 0))  # a graph without hooks
    async with ac.overlap.shard_optimizer(forward, sgd(forward.parameters()), **SMALL) as optimizer:
        for turn in range(3):
            optimizer.zero_grad()
            forward(batch(me.rank, turn)).square().mean().backward()
            await optimizer.step()
            with torch.no_grad():
                seen = forward(batch(0, 9))  # only its forward waits for the parameters
            whole.zero_grad()
            on_all_data(twin, me.size, turn)
            whole.step()
            assert close(seen, twin(batch(0, 9)).detach())
    same(ours, twin)


@pytest.mark.parametrize("before", [False, True], ids=["sharded first", "compiled first"])
def test_a_compiled_model(pair: World, before: bool) -> None:
    """The compiled graph also reads the parameters of the last step."""
    pair.run(compiled, before, runner="asyncio")


def forget(how: str, optimizer: ac.overlap.ShardedOptimizer, model: nn.Module) -> None:
    if how == "skip":
        optimizer.skip()
    elif how == "model.zero_grad":
        model.zero_grad()
    elif how == "model.zero_grad to zeros":
        model.zero_grad(set_to_none=False)
    else:
        optimizer.zero_grad()


async def skipped(me: Rank, how: str, clips: bool) -> None:
    ours, twin = network(), network()
    whole = sgd(twin.parameters())
    with ac.overlap.shard_optimizer(ours, sgd(ours.parameters()), **SMALL) as optimizer:
        for turn in range(4):
            x = batch(me.rank, turn)
            if turn == 1 and me.rank == 0:
                x = torch.full_like(x, torch.inf)
            loss_of(ours, x).backward()
            if clips:
                norm = await optimizer.clip_grad_norm_(0.01)
                assert norm.isfinite() == (turn != 1)
            else:
                await optimizer.reduced()
            if turn == 1:
                forget(how, optimizer, ours)
                continue
            await optimizer.step()
            forget("zero_grad", optimizer, ours)

            on_all_data(twin, me.size, turn)
            if clips:
                assert close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.01))
            whole.step()
            whole.zero_grad()
    same(ours, twin)


@pytest.mark.parametrize("clips", [True, False], ids=["clip", "reduced"])
@pytest.mark.parametrize("how", ["skip", "zero_grad", "model.zero_grad", "model.zero_grad to zeros"])
def test_a_step_that_is_skipped(pair: World, how: str, clips: bool) -> None:
    """A skipped step leaves no trace in later ones."""
    pair.run(skipped, how, clips, runner="asyncio")


async def never_zeroed(me: Rank, no_sync: bool) -> None:
    ours, twin = network(), network()
    whole = torch.optim.SGD(twin.parameters(), lr=0.01)
    with ac.overlap.shard_optimizer(ours, torch.optim.SGD(ours.parameters(), lr=0.01), **SMALL) as optimizer:
        for turn in range(3):
            if no_sync:
                with optimizer.no_sync():
                    loss_of(ours, batch(me.rank, turn + 10)).backward()
                on_all_data(twin, me.size, turn + 10)
            if me.rank < me.size - 1 or turn != 1:  # in one step the last rank has no data
                loss_of(ours, batch(me.rank, turn)).backward()
            await optimizer.step()

            for rank in range(me.size):
                if rank < me.size - 1 or turn != 1:
                    (loss_of(twin, batch(rank, turn)) / me.size).backward()
            whole.step()
    same(ours, twin)


@pytest.mark.parametrize("no_sync", [False, True])
def test_gradients_that_nobody_zeroes(world: World, no_sync: bool) -> None:
    """They accumulate over the steps, as in one process."""
    world.run(never_zeroed, no_sync, runner="asyncio")


async def half_zeroed(me: Rank) -> None:
    ours, twin = network(), network()
    whole = torch.optim.SGD(twin.parameters(), lr=0.01)
    with ac.overlap.shard_optimizer(ours, torch.optim.SGD(ours.parameters(), lr=0.01)) as optimizer:
        for turn in range(3):
            loss_of(ours, batch(me.rank, turn)).backward()
            await optimizer.step()
            on_all_data(twin, me.size, turn)
            whole.step()
            for model in (ours, twin):
                model[0].zero_grad()
    same(ours, twin)


def test_some_gradients_are_zeroed_and_others_not(pair: World) -> None:
    """Both kinds are in one bucket."""
    pair.run(half_zeroed, runner="asyncio")


def overflowed_and_zeroed(me: Rank) -> None:
    ours, twin = network(), network()
    with ac.overlap.shard_optimizer(ours, sgd(ours.parameters())) as optimizer:
        (loss_of(ours[3], torch.ones(1, 24)) * torch.inf).backward()
        optimizer.reduced().wait()
        ours[3].zero_grad()
        loss_of(ours, batch(me.rank, 0)).backward()
        optimizer.step().wait()
        optimizer.gathered().wait()
    on_all_data(twin, me.size, 0)
    sgd(twin.parameters()).step()
    same(ours, twin)


def test_gradients_that_were_not_finite_are_zeroed(pair: World) -> None:
    """Those of one layer are zeroed, in a bucket with others."""
    pair.run(overflowed_and_zeroed, runner="blocking")


def trained(me: Rank) -> nn.Module:
    """Train as in many programs: the optimizer's lifetime ends with the function."""
    model = network()
    optimizer = ac.overlap.shard_optimizer(model, sgd(model.parameters()), **SMALL)
    loss_of(model, batch(me.rank, 0)).backward()
    optimizer.step().wait()
    return model


async def dropped(me: Rank) -> None:
    twin = network()
    on_all_data(twin, me.size, 0)
    sgd(twin.parameters()).step()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        first, second = trained(me), trained(me)
        gc.collect()
    if me.size > 1:
        told = [one for one in heard if "a ShardedOptimizer was dropped" in str(one.message)]
        assert len(told) == 2
        for one in told:  # the code that triggers garbage collection is not blamed
            assert "shard_optimizer(" in linecache.getline(one.filename, one.lineno)
    assert torch.allclose(first(batch(0, 5)), twin(batch(0, 5)), rtol=1e-4, atol=1e-5)
    for name, value in second.state_dict().items():
        assert torch.allclose(value, twin.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_ends_before_its_parameters_are_there(pair: World) -> None:
    """The model's forward and `state_dict()` wait for the parameters, and a warning reports the drop."""
    pair.run(dropped, runner="asyncio")


async def different_starts(me: Rank) -> None:
    ours, twin = network(), network()
    for parameter in ours.parameters():
        parameter.data.add_(me.rank)
    whole = sgd(twin.parameters())
    with ac.overlap.shard_optimizer(ours, sgd(ours.parameters()), **SMALL) as optimizer:
        loss_of(ours, batch(me.rank, 0)).backward()
        await optimizer.step()
    on_all_data(twin, me.size, 0)
    whole.step()
    same(ours, twin)


def test_ranks_that_start_from_different_weights(world: World) -> None:
    """All ranks train the first rank's weights."""
    world.run(different_starts, runner="asyncio")


async def changed_meanwhile(me: Rank) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = ac.overlap.shard_optimizer(model, sgd(model.parameters()), **SMALL)
    with raising(ac.InvalidArgumentError, "[2, 2]", "added after"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    model[0].bias.requires_grad_(True)
    with raising(ac.InvalidArgumentError, "'0.bias'", "unfreeze"):
        await optimizer.step()
    model[0].bias.requires_grad_(False)
    optimizer.wrapped.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
    with raising(ac.InvalidArgumentError, "[3, 2]", "added after"):
        await optimizer.step()
    optimizer.close()
    converted = network()
    with ac.overlap.shard_optimizer(converted, sgd(converted.parameters())) as optimizer:
        converted.double().float()
        with raising(ac.InvalidArgumentError, "other memory", "convert the model first"):
            await optimizer.step()


def test_parameters_that_come_later_are_refused(pair: World) -> None:
    """They are refused by name before anything is sent: no rank would train them."""
    pair.run(changed_meanwhile, runner="asyncio")


async def changed_on_one(me: Rank) -> None:
    model = network()
    optimizer = ac.overlap.shard_optimizer(model, sgd(model.parameters()), lane="one changed", **SMALL)
    loss_of(model, batch(me.rank, 0)).backward()
    if me.rank:
        model[0].bias.requires_grad_(False)
        with raising(ac.InvalidArgumentError, "'0.bias'", "freeze"):
            await optimizer.step()
    else:
        with raising(ac.PeerRefusedError, "rank 1", "'0.bias'", "freeze"):
            await optimizer.step()
    optimizer.close()
    await trains_in_parts(me, model, "one changed")


async def trains_in_parts(me: Rank, model: nn.Module, lane: str) -> None:
    """Train the model on all ranks, which are in step again, and compare the parameters."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with ac.overlap.shard_optimizer(model, sgd(model.parameters()), lane=lane, **SMALL) as optimizer:
        await steps(me, model, optimizer)


async def steps(me: Rank, model: nn.Module, optimizer: Any) -> None:
    for turn in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(me.rank, turn)).backward()
        await optimizer.step()
    await optimizer.gathered()
    await ac.overlap.check_parameters(model)


def test_a_parameter_frozen_on_one_rank_alone(pair: World) -> None:
    """The others hear of it in the same step, before they update their parts of the parameters."""
    pair.run(changed_on_one, runner="asyncio")


def frozen_before_backward(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)
    loss_of(model, batch(1, 0)).backward()


def scaled_before_backward(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(1.0)


#: By name: what one rank does in place of backward, and the error that it gets.
UNSENT: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "frozen": (frozen_before_backward, "'0.bias'"),
    "written to": (scaled_before_backward, "was written to after it had been reduced"),
}


async def refused_with_unsent_gradients(me: Rank, name: str, reduced: bool) -> None:
    """Rank 1 refuses a step while the others wait for its gradients, or (``reduced``) ask for more."""
    differs, told = UNSENT[name]
    lane = f"unsent {name} {reduced}"
    model = network()
    with ac.overlap.shard_optimizer(model, sgd(model.parameters()), lane=lane, **SMALL) as optimizer:
        loss_of(model, batch(me.rank, 0)).backward()
        await (optimizer.reduced() if reduced else optimizer.step())
        await optimizer.gathered()
        if me.rank:
            differs(model)
        elif not reduced:
            loss_of(model, batch(me.rank, 1)).backward()
        with raising(ac.InvalidArgumentError if me.rank else ac.PeerRefusedError, told):
            await optimizer.step()
        model[0].bias.requires_grad_(True)
        await steps(me, model, optimizer)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", UNSENT)
def test_a_step_that_one_rank_refuses_before_it_has_sent_its_gradients(
    pair: World, name: str, reduced: bool
) -> None:
    """The others hear of it where they wait, and all can go on. Regression: they waited in vain."""
    pair.run(refused_with_unsent_gradients, name, reduced, timeout=patient(10))


OPTIMIZERS: dict[str, Make] = {
    "Adagrad": lambda parameters: torch.optim.Adagrad(
        parameters, lr=0.05, initial_accumulator_value=0.1, weight_decay=0.01
    ),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True, amsgrad=True),
    "Adam fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "SGD": sgd,
}


async def taken_over(me: Rank, name: str) -> None:
    """Train whole, then sharded; load the state saved into another sharded optimizer and into a whole one."""
    twin = network()
    whole = OPTIMIZERS[name](twin.parameters())
    ours = network()
    before = OPTIMIZERS[name](ours.parameters())
    for turn in range(2):
        for model, optimizer in ((ours, before), (twin, whole)):
            optimizer.zero_grad()
            on_all_data(model, me.size, turn)
            optimizer.step()
    async with ac.overlap.shard_optimizer(ours, before, **SMALL) as sharded:
        await both(me, sharded, whole, ours, twin, 2)
        saved = await sharded.full_state_dict()
    expected = whole.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    oracle.same(saved["state"], {k: dict(sorted(v.items())) for k, v in expected["state"].items()}, rtol=1e-4)

    resumed = copy.deepcopy(twin)  # with another layout of buckets, as on another number of ranks
    again = ac.overlap.shard_optimizer(
        resumed, OPTIMIZERS[name](resumed.parameters()), bucket_bytes=50, first_bucket_bytes=50
    )
    again.load_full_state_dict(copy.deepcopy(saved))
    alone = copy.deepcopy(twin)
    plain = OPTIMIZERS[name](alone.parameters())
    plain.load_state_dict(saved)
    async with again:
        await both(me, again, whole, resumed, twin, 3)
    on_all_data(alone, me.size, 3)
    plain.step()
    same(resumed, twin)
    same(alone, twin)


async def both(me: Rank, sharded: Any, whole: Any, ours: nn.Module, twin: nn.Module, turn: int) -> None:
    sharded.zero_grad()
    loss_of(ours, batch(me.rank, turn)).backward()
    await sharded.step()
    whole.zero_grad()
    on_all_data(twin, me.size, turn)
    whole.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_the_whole_optimizer(world: World, name: str) -> None:
    """Sharded and put together again, it equals one process's state; any number of ranks can load it."""
    world.run(taken_over, name, runner="asyncio")


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_of_parameters_that_were_not_always_used(kind: Make) -> None:
    """Parameters of a bucket share one value of each number, from the parameter with the most steps."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    optimizer = kind(model.parameters())
    for used in (2, 1, 1):
        optimizer.zero_grad()
        sum(layer(torch.ones(1, 2)).sum() for layer in model[:used]).backward()
        optimizer.step()
    expected = {name: x.clone() for name, x in optimizer.state[model[0].weight].items() if name in _NUMBERS}
    with ac.overlap.shard_optimizer(model, optimizer) as sharded:
        for state in sharded.full_state_dict().wait()["state"].values():
            for name, number in expected.items():
                oracle.same(state[name], number)


_NUMBERS = {"step", "mu_product", "eta", "mu"}


async def kept_in_memory(me: Rank, kind: str) -> None:
    """Train twice from one state, with a scheduler that halves a rate in place."""
    model = network()
    if kind == "optimizer":
        raw = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        sharded = ac.overlap.shard_optimizer(model, raw, **SMALL)
        state = await sharded.full_state_dict()
        load = sharded.load_full_state_dict
    else:
        layers = ac.overlap.shard_layers([model[0], model[3], model[5]])
        raw = torch.optim.AdamW(layers.parameters(), lr=torch.tensor(0.5))
        state = await layers.full_optimizer_state(raw)
        load = partial(layers.load_full_optimizer_state, raw)
    for _ in range(2):
        load(state)
        assert raw.param_groups[0]["lr"].item() == 0.5
        raw.param_groups[0]["lr"].mul_(0.5)  # as torch's schedulers do if a rate is a tensor
    if kind == "optimizer":
        await sharded.aclose()


@pytest.mark.parametrize("kind", ["optimizer", "layers"])
def test_a_state_in_memory_is_a_copy(pair: World, kind: str) -> None:
    """Regression: a rate that is a tensor was shared with the saved state, so later rates ended up in it."""
    pair.run(kept_in_memory, kind, runner="asyncio")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_of_another_dtype_is_loaded_as_torch_does(dtype: torch.dtype) -> None:
    """Regression: the next step failed inside torch, with means of one dtype and gradients of another."""
    saved = nn.Sequential(nn.Linear(3, 3))
    adam = torch.optim.Adam(saved.parameters())
    saved(torch.ones(1, 3)).square().sum().backward()
    adam.step()
    state = adam.state_dict()
    named = {"state": dict(zip(("0.weight", "0.bias"), state["state"].values(), strict=True))}
    named["param_groups"] = [{**state["param_groups"][0], "params": ["0.weight", "0.bias"]}]
    model, ours, theirs = (copy.deepcopy(saved).to(dtype) for _ in range(3))
    x = torch.ones(1, 3, dtype=dtype)

    whole = torch.optim.Adam(model.parameters())
    whole.load_state_dict(copy.deepcopy(state))  # torch steps in the state it has loaded
    model.zero_grad()
    model(x).square().sum().backward()
    whole.step()

    with ac.overlap.shard_optimizer(ours, torch.optim.Adam(ours.parameters())) as optimizer:
        optimizer.load_full_state_dict(state)
        optimizer.zero_grad()
        ours(x).square().sum().backward()
        optimizer.step().wait()
    layers = ac.overlap.shard_layers(theirs)
    raw = torch.optim.Adam(layers.parameters())
    layers.load_full_optimizer_state(raw, named)
    for layer in layers:
        layer(x).square().sum().backward()
    raw.step()
    got = layers.full_state_dict().wait()
    for (name, want), other in zip(model.named_parameters(), ours.parameters(), strict=True):
        oracle.same(other.detach(), want.detach())
        oracle.same(got[name], want.detach())


async def of_other_groups(me: Rank) -> None:
    model = network()
    with ac.overlap.shard_optimizer(model, sgd(model.parameters())) as optimizer:
        other = sgd([nn.Parameter(torch.ones(1))]).state_dict()
        with raising(ac.InvalidArgumentError, "[1]", "[6]"):
            optimizer.load_full_state_dict(other)
        state = await optimizer.full_state_dict()
        # Before the first step there is no state, and torch.distributed.checkpoint drops an empty dict.
        assert state.pop("state") == {}
        optimizer.load_full_state_dict(state)
        assert (await optimizer.full_state_dict())["state"] == {}
        with raising(ac.InvalidArgumentError, "['77']"):
            optimizer.load_full_state_dict({**state, "state": {77: {}}})
        with raising(ac.InvalidArgumentError, "await optimizer.full_state_dict()"):
            optimizer.state_dict()
        with raising(ac.InvalidArgumentError, "optimizer.load_full_state_dict(state)"):
            optimizer.load_state_dict(state)


def test_a_state_of_another_model_or_of_one_rank_is_refused(pair: World) -> None:
    pair.run(of_other_groups, runner="asyncio")


async def clipped(me: Rank, dtype: torch.dtype, norm_type: float) -> None:
    def make() -> nn.Module:
        made = alike(nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 2))).to(dtype)
        if dtype.is_complex:
            for parameter in made.parameters():
                parameter.data.mul_(0.6 + 0.8j).add_(0.1j)  # neither part alone has the norm of the whole
        return made

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.to(dtype)).abs().square().mean()

    ours, twin = make(), make()
    with ac.overlap.shard_optimizer(ours, torch.optim.SGD(ours.parameters(), lr=0.1), **SMALL) as optimizer:
        loss(ours, batch(me.rank, 0)).backward()
        norm = await optimizer.clip_grad_norm_(0.01, norm_type)
        await optimizer.step()
    on_all_data(twin, me.size, 0, loss)
    # Use torch's own: torch_xla replaces it with one that takes no complex gradients.
    clip = getattr(nn.utils.clip_grad_norm_, "_orig", nn.utils.clip_grad_norm_)
    expected = clip(twin.parameters(), 0.01, norm_type)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.allclose(
        norm.double(), expected.double(), rtol=1e-5 if dtype is not torch.bfloat16 else 0.02
    )
    assert (norm.dtype is torch.float64) == (dtype is torch.float64)
    for mine, its in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16], ids=str)
def test_clipping_of_any_dtype(pair: World, dtype: torch.dtype, norm_type: float) -> None:
    pair.run(clipped, dtype, norm_type, runner="asyncio")


def not_a_number(me: Rank, norm_type: float) -> None:
    model = nn.Linear(8, 8)
    with ac.overlap.shard_optimizer(model, sgd(model.parameters())) as optimizer:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.reduced().wait()
        part = optimizer.wrapped.param_groups[0]["params"][0].grad
        if me.rank == 1:
            part[0] = torch.nan
        norm = optimizer.clip_grad_norm_(1.0, norm_type).wait()
        assert norm.isnan()
        assert part.isnan().all()


@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_a_gradient_that_is_not_a_number_on_one_rank(pair: World, norm_type: float) -> None:
    """All ranks notice. Regression: gloo's maximum of tensors lost it, and all ranks stepped."""
    pair.run(not_a_number, norm_type, runner="blocking")


async def scaled(me: Rank, clips: bool) -> None:
    ours, twin = network(), network()
    whole = sgd(twin.parameters())
    mine, its = (torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in range(2))
    async with ac.overlap.shard_optimizer(ours, sgd(ours.parameters()), **SMALL) as optimizer:
        for turn in range(4):
            overflows = turn == 1
            x = batch(me.rank, turn)
            if overflows and me.rank == me.size - 1:
                x = torch.full_like(x, torch.inf)  # on one rank, but in every rank's shard
            optimizer.zero_grad()
            mine.scale(loss_of(ours, x)).backward()
            if clips:
                await optimizer.unscale_(mine)
                await optimizer.clip_grad_norm_(0.01)
            await optimizer.step(scaler=mine)
            mine.update()

            whole.zero_grad()
            its.scale(loss_of(twin, batch(0, turn) * (torch.inf if overflows else 0))).backward()
            for parameter in twin.parameters():
                if not overflows:
                    parameter.grad = None
            if not overflows:
                for rank in range(me.size):
                    its.scale(loss_of(twin, batch(rank, turn)) / me.size).backward()
            if clips:
                its.unscale_(whole)
                nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
            its.step(whole)
            its.update()
            assert mine.get_scale() == its.get_scale()
    same(ours, twin)


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clip"])
def test_a_gradient_scaler(world: World, clips: bool) -> None:
    """An overflow on one rank skips the step on all ranks, with or without clipping."""
    world.run(scaled, clips, runner="asyncio")


async def by_closure(me: Rank) -> None:
    ours, twin = network(), network()
    whole = sgd(twin.parameters())
    async with ac.overlap.shard_optimizer(ours, sgd(ours.parameters()), **SMALL) as optimizer:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(ours, batch(me.rank, 0))
            loss.backward()
            return loss

        for _ in range(2):
            assert (await optimizer.step(closure)).requires_grad
            whole.zero_grad()
            on_all_data(twin, me.size, 0)
            whole.step()
    same(ours, twin)


def test_a_closure(pair: World) -> None:
    pair.run(by_closure, runner="asyncio")

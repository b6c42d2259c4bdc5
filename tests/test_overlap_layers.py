"""Layers sharded over the ranks and prefetched: same results as with whole layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
import oracle
from overlapping import alike, batch
from patience import patient
from ranks import Rank, raising
from worlds import World


class Block(nn.Module):
    """A block with a frozen scale, a buffer and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor, *, residual: bool) -> Tensor:
        return torch.tanh(self.norm(self.inner(x))) * self.scale[0] + self.shift + (x if residual else 0)


def blocks() -> nn.ModuleList:
    made = nn.ModuleList(Block() for _ in range(4))
    return alike(made)


def inputs(me: Rank, step: int) -> Tensor:
    return batch(me.rank, step).reshape(-1, 8)


async def through(me: Rank, layers: ac.overlap.ShardedLayers, x: Tensor) -> Tensor:
    if me.runner == "blocking":
        for layer in layers:
            x = layer(x, residual=True)
    else:
        async for layer in layers:
            x = layer(x, residual=True)
    return x


async def against_whole(me: Rank, ahead: int) -> None:
    twin = blocks()
    whole = torch.optim.Adam([p for p in twin.parameters() if p.requires_grad], lr=0.01)
    layers = ac.overlap.shard_layers(blocks(), ahead=ahead)
    optimizer = torch.optim.Adam([p for p in layers.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        result = await through(me, layers, inputs(me, step))
        (result.square().mean() / me.size).backward()
        optimizer.step()

        whole.zero_grad()
        x = inputs(me, step)
        for block in twin:
            x = block(x, residual=True)
        oracle.same(result.detach(), x.detach(), rtol=0 if me.size <= 2 else 1e-4)
        (x.square().mean() / me.size).backward()
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.grad = ac.all_reduce(parameter.grad).wait()
        whole.step()
    kept = sum(parameter.numel() for parameter in layers.parameters())
    assert kept <= sum(parameter.numel() for parameter in twin.parameters()) / me.size + 8 * me.size


@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_as_the_whole_layers(world: World, runner: str, ahead: int) -> None:
    """After some steps the results are equal bit for bit on one and two ranks, whatever is prefetched."""
    if ahead != 1 and runner == "trio":
        runner = "asyncio"
    world.run(against_whole, ahead, runner=runner)


async def ahead_of_use(me: Rank) -> None:
    layers = ac.overlap.shard_layers([nn.Linear(3, 3) for _ in range(4)], ahead=2)
    started = []
    with torch.no_grad(), ac.trace.recording() as timeline:
        async for layer in layers:
            layer(torch.ones(1, 3))
            started.append(sum(span.is_operation for span in timeline.spans))
        assert [layer.module for layer in reversed(layers)] == [layer.module for layer in list(layers)[::-1]]
    assert started == [6, 8, 8, 8]  # for each layer its number and its shards


def test_the_next_layers_are_under_way(pair: World) -> None:
    """While one layer is used, the next two have been started, and no more."""
    pair.run(ahead_of_use, runner="asyncio")


async def left_early(me: Rank) -> None:
    starts = [partial(ac.all_gather, torch.full((2,), float(turn))) for turn in range(4)]
    for value in ac.overlap.prefetch(starts, ahead=2):
        oracle.same(value, torch.zeros(2 * me.size))
        break
    seen = [value async for value in ac.overlap.prefetch(iter(starts), ahead=1)]
    oracle.same(seen, [torch.full((2 * me.size,), float(turn)) for turn in range(4)])


def test_a_loop_that_is_left_early(pair: World) -> None:
    """Operations that were started complete anyway, and the next loop is right."""
    pair.run(left_early, runner="asyncio")


def test_training_and_evaluation_are_the_layers_too() -> None:
    """The sharded layers take the place of the layers in a model, whose `eval()` reaches them."""
    layers = ac.overlap.shard_layers([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))])
    x = torch.ones(64, 4)
    model = nn.Sequential(layers).eval()
    (layer,) = layers
    oracle.same(layer(x).detach(), layer(x).detach())
    model.train()
    assert not torch.equal(layer(x), layer(x))


def test_refused() -> None:
    """The call is refused before anything is sent or taken over."""
    tied = nn.Linear(2, 2)
    with raising(ac.InvalidArgumentError, "layers 0 and 2 share"):
        ac.overlap.shard_layers([tied, nn.Linear(2, 2), tied])
    with raising(ac.InvalidArgumentError, "layer 1 (Tanh)"):
        ac.overlap.shard_layers([nn.Linear(2, 2), nn.Tanh()])
    with raising(ac.InvalidArgumentError, "ahead"):
        ac.overlap.shard_layers([nn.Linear(2, 2)], ahead=-1)
    with ac.overlap_gradients(tied), raising(ac.InvalidArgumentError, "already reduces the gradients"):
        ac.overlap.shard_layers([tied])
    with raising(ac.InvalidArgumentError, "of shape [3, 2]", "sparse=True"):
        ac.overlap.shard_layers([tied, nn.Embedding(3, 2, sparse=True)])
    assert tied.weight.numel() == 4


def test_a_call_outside_of_a_loop_says_where_the_parameters_are() -> None:
    """A forward of the model that calls its layers itself used to fail in torch, about shapes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, expected = torch.ones(2, 4), model(torch.ones(2, 4))
    layers = ac.overlap.shard_layers(model)
    with raising(ac.InvalidArgumentError, "call them in a loop over what shard_layers returned"):
        model(x)
    for layer in layers:
        x = layer(x)
    oracle.same(x, expected)


def test_an_optimizer_state_of_other_layers_is_refused() -> None:
    """By the name of its parameter, with both shapes."""
    layers = ac.overlap.shard_layers([nn.Linear(3, 4)])
    optimizer = torch.optim.Adagrad(layers.parameters())
    saved = layers.full_optimizer_state(optimizer).wait()
    saved["state"]["0.weight"]["sum"] = torch.ones(1, 3)  # type: ignore[index]
    with raising(ac.InvalidArgumentError, "'sum' of the parameter '0.weight' has shape [1, 3]", "[4, 3]"):
        layers.load_full_optimizer_state(optimizer, saved)


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_that_looks_at_whole_parameters(scheduled: bool) -> None:
    """It is refused in its first step. Regression: on shards it silently computed other numbers."""
    layers = ac.overlap.shard_layers([nn.Linear(3, 4)])
    optimizer = torch.optim.Adafactor(layers.parameters())
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = [x.clone() for x in layers.parameters()]
    (layer,) = layers
    layer(torch.ones(2, 3)).sum().backward()
    with raising(ac.InvalidArgumentError, "Adafactor is not elementwise"):
        optimizer.step()
    assert all(map(torch.equal, layers.parameters(), before))
    torch.optim.Adam(layers.parameters(), lr=torch.tensor(0.1), capturable=False).step()
    assert not any(map(torch.equal, layers.parameters(), before))


def test_layers_that_are_frozen_and_unfrozen_in_the_model() -> None:
    """The shards follow. Regression: they were trained, or not, as before."""
    blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)])
    layers = ac.overlap.shard_layers(blocks)
    first, second = layers.parameters()
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    for frozen in (blocks[1], blocks[0]):
        for block in blocks:
            block.requires_grad_(block is not frozen)
        optimizer.zero_grad()
        before = [first.clone(), second.clone()]
        x = torch.ones(2, 3)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        same = [torch.equal(first, before[0]), torch.equal(second, before[1])]
        assert same == [frozen is block for block in blocks]
    blocks[0].weight.requires_grad_(True)
    with raising(ac.InvalidArgumentError, "'weight' of layer 0 was unfrozen", "'bias'"):
        list(layers)


@pytest.mark.parametrize("own", [False, True])
def test_a_hook_on_a_parameter_is_refused(own: bool) -> None:
    """Regression: on a part it ran before the gradient was there, and on the layer's own parameter never."""
    layer = nn.Linear(3, 3)
    layers = ac.overlap.shard_layers([layer])
    parameter = layer.weight if own else next(layers.parameters())
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with raising(ac.InvalidArgumentError, "has a hook", "after backward()"):
            list(layers)
        with torch.no_grad():
            iter(layers)
        handle.remove()
    iter(layers)


def test_an_optimizer_of_the_empty_parameters_is_warned_of() -> None:
    """Regression: made before the layers were sharded, it silently trained none of them."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = ac.overlap.shard_layers([model[0]])
    both = torch.optim.SGD([*model.parameters(), *layers.parameters()], lr=0.1)
    rest = torch.optim.SGD(model[1].parameters(), lr=0.1)
    (layer,) = layers
    model[1](layer(torch.ones(2, 3))).sum().backward()
    with pytest.warns(RuntimeWarning, match="does not train layer 0") as warned:
        before.step()
    assert warned[0].filename == __file__
    rest.step()
    start = [x.clone() for x in layers.parameters()]
    both.step()
    assert not any(map(torch.equal, layers.parameters(), start))
    both.zero_grad()
    before.step()  # there is nothing to leave out, as if the layers were frozen


async def refused_on_one(me: Rank) -> None:
    if me.rank == 0:
        with raising(ac.InvalidArgumentError, "ahead"):
            ac.overlap.shard_layers(blocks(), lane="half refused", ahead=-1)
    else:
        layers = ac.overlap.shard_layers(blocks(), lane="half refused")
        with raising(ac.PeerRefusedError, "ahead"):
            await through(me, layers, inputs(me, 0))
    ac.close_lane("half refused")


def test_layers_that_one_rank_cannot_shard_are_refused_on_all(several: World) -> None:
    """The others would wait in their first loop."""
    several.run(refused_on_one, runner="asyncio", timeout=patient(20))

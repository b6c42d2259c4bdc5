"""Sharded layers in realistic loops: same results as one process with the whole layers."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import asynccoll as ac
import oracle
import worlds
from overlapping import alike, batch, close
from patience import patient
from ranks import Rank, raising
from worlds import World


class Tied(nn.Module):
    """A layer with a parameter under two names, a buffer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.relu(self.first(x)))) + self.shift * self.passing


def blocks() -> nn.ModuleList:
    return alike(nn.ModuleList([nn.Linear(8, 8), Tied(), nn.Linear(8, 8), nn.Linear(8, 3)]))


def rows(rank: int, turn: int) -> Tensor:
    return batch(rank, turn).reshape(-1, 8)


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


async def through_gathered(layers: ac.overlap.ShardedLayers, x: Tensor) -> Tensor:
    async for layer in layers:
        x = layer(x)
    return x


def whole_backward(model: nn.Module, size: int, turn: int) -> None:
    for rank in range(size):
        (through(model, rows(rank, turn)).square().mean() / size).backward()


def whole_named(model: nn.ModuleList, layers: ac.overlap.ShardedLayers) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in model.state_dict().items()}


async def trained(me: Rank, reshard: bool) -> None:
    twin = blocks()
    whole = torch.optim.AdamW(twin.parameters(), lr=0.01)
    layers = ac.overlap.shard_layers(blocks(), reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for turn in range(4):
        for part in (0, 10):  # two backwards, accumulated
            with ac.trace.recording() as timeline:
                loss = (await through_gathered(layers, rows(me.rank, turn + part))).square().mean() / me.size
                loss.backward()
            whole_backward(twin, me.size, turn + part)
            names = [span.name for span in timeline.spans if span.is_operation]
            if me.size > 1:
                assert names.count("reduce_scatter") == 4
                assert names.count("all_gather") == 2 * (8 if reshard else 4)  # with each layer's number
        if turn % 2:
            norm = await layers.clip_grad_norm_(0.05)
            assert close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        whole.step()
        whole.zero_grad()
    saved, expected = await layers.full_state_dict(), whole_named(twin, layers)
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(saved[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
def test_accumulated_and_clipped(world: World, reshard: bool) -> None:
    """Gradients accumulate over backwards; full parameters are kept for backward, or gathered again."""
    world.run(trained, reshard, runner="asyncio")


async def interrupted(me: Rank) -> None:
    twin = blocks()
    whole = torch.optim.SGD(twin.parameters(), lr=0.1)
    layers = ac.overlap.shard_layers(blocks())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for turn in range(4):
        succeeded = True
        try:
            x = rows(me.rank, turn)
            async for layer in layers:
                if turn == 1 and me.rank == 0 and layer.module is layers._layers[1].module:
                    raise ValueError("of this rank alone")
                x = layer(x)
        except ValueError:
            succeeded = False
            await layers.finish_loop()
        if not await ac.all_reduce(succeeded, op="and"):
            continue
        (x.square().mean() / me.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole_backward(twin, me.size, turn)
        whole.step()
        whole.zero_grad()
    saved = await layers.full_state_dict()
    for name, value in whole_named(twin, layers).items():
        assert torch.allclose(saved[name], value, rtol=1e-4, atol=1e-5), name


def test_a_loop_that_raises_on_one_rank(several: World) -> None:
    """Once the rank has gathered the layers it left out, the ranks are in step again."""
    several.run(interrupted, runner="asyncio")


async def dropped_differently(me: Rank) -> None:
    layers = ac.overlap.shard_layers([nn.Linear(4, 4) for _ in range(3)], ahead=0)
    chosen = layers._layers if me.rank == 0 else layers._layers[1:]
    with raising(ac.CollectiveMismatchError, "layer 0", "layer 1"):
        async for layer in layers._gathered(chosen):
            layer(torch.ones(1, 4))


@pytest.mark.processes
def test_ranks_that_run_different_layers() -> None:
    """The layers have the same shape, and everything is checked: the error names both."""
    worlds.world("gloo", 2, check="full").run(dropped_differently, runner="asyncio")


async def converted(me: Rank) -> None:
    twin = blocks().double()
    layers = ac.overlap.shard_layers(blocks()).double()
    x = rows(me.rank, 0).double()
    got = await through_gathered(layers, x)
    assert got.dtype is torch.float64
    oracle.same(got.detach(), through(twin, x).detach(), rtol=1e-6)


def test_conversions_reach_what_the_layers_hold(pair: World) -> None:
    """Buffers are converted, too."""
    pair.run(converted, runner="asyncio")


def samples(turn: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(turn))


def made() -> tuple[nn.Module, nn.ModuleList]:
    """Make a model for the sharded optimizer, and layers."""
    torch.manual_seed(5)
    head = alike(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)))
    return head, blocks()


async def steps(me: Rank, directory: str, turns: range, resume: bool) -> list[float]:
    """Train from a checkpoint, or from scratch, to a checkpoint; return the losses of all data."""
    from torch.distributed import checkpoint  # slow to import
    from torch.distributed.checkpoint import format_utils

    head, body = made()
    head[1].eval()  # its statistics would be those of a rank's own data
    layers = ac.overlap.shard_layers(body)
    of_layers = torch.optim.AdamW(layers.parameters(), lr=0.01)
    of_head = ac.overlap.shard_optimizer(
        head, torch.optim.Adam(head.parameters(), lr=0.01), op="sum", bucket_bytes=40
    )
    if resume:
        state: dict[str, Any] = {
            "head": head.state_dict(),
            "layers": await layers.full_state_dict(),
        }
        checkpoint.load(state, checkpoint_id=directory)
        head.load_state_dict(state["head"])
        layers.load_full_state_dict(state["layers"])
        saved = torch.load(f"{directory}.pt")
        for name, value in state["layers"].items():
            assert torch.equal(saved["layers"][name], value)
        of_head.load_full_state_dict(saved["of head"])
        layers.load_full_optimizer_state(of_layers, saved["of layers"])
    losses = []
    for turn in turns:
        own = samples(turn).chunk(me.size)[me.rank]
        loss = head(await through_gathered(layers, own)).square().mean() / me.size
        of_head.zero_grad()
        loss.backward()
        await of_head.step()
        of_layers.step()
        of_layers.zero_grad()
        losses.append(await ac.all_reduce(loss.item()))
    state = {
        "head": head.state_dict(),
        "layers": await layers.full_state_dict(),
        "of head": await of_head.full_state_dict(),
        "of layers": await layers.full_optimizer_state(of_layers),
    }
    if not resume:
        checkpoint.save(state, checkpoint_id=directory)
        if me.rank == 0:
            format_utils.dcp_to_torch_save(directory, f"{directory}.pt")
        await ac.barrier()
    await of_head.aclose()
    return losses


async def alone(turns: range) -> list[float]:
    head, body = made()
    head[1].eval()
    whole = torch.optim.AdamW(body.parameters(), lr=0.01)
    of_head = torch.optim.Adam(head.parameters(), lr=0.01)
    losses = []
    for turn in turns:
        loss = head(through(body, samples(turn))).square().mean()
        for optimizer in (whole, of_head):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (whole, of_head):
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.processes
def test_resumed_on_another_number_of_ranks(tmp_path: Any) -> None:
    """State saved on two ranks by torch's distributed checkpoint resumes on three and one as without a break.

    The optimizers' state is read from the one file that torch makes of it, where numbers have become strings.
    """
    coroutine = alone(range(5))
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    expected = stop.value.value
    where = str(tmp_path / "saved")
    found = worlds.world("gloo", 2).run(steps, where, range(2), False, runner="asyncio")
    assert copy.copy(found[0]) == pytest.approx(expected[:2], rel=1e-4)
    for size in (3, 1):
        resumed = worlds.world("gloo", size).run(steps, where, range(2, 5), True, runner="asyncio")
        assert resumed[0] == pytest.approx(expected[2:], rel=1e-4)


async def dropped(me: Rank, reshard: bool) -> None:
    twin = blocks()
    layers = ac.overlap.shard_layers(blocks(), reshard_after_forward=reshard)
    for turn in range(3):
        for rank in range(me.size):
            x = rows(rank, turn)
            for index, layer in enumerate(twin):
                x = x if index == (rank + turn) % 3 else layer(x)
            (x.square().mean() / me.size).backward()
        x = rows(me.rank, turn)
        async for layer in layers:
            x = x if layer.module is layers._layers[(me.rank + turn) % 3].module else layer(x)
        (x.square().mean() / me.size).backward()
    for shard, expected in zip(layers.parameters(), _parts_of_gradients(twin, me), strict=True):
        assert close(shard.grad, expected)


def _filled_up(x: Tensor, multiple: int) -> Tensor:
    return torch.cat([x, x.new_zeros(-x.numel() % multiple)])


def _parts_of_gradients(twin: nn.ModuleList, me: Rank) -> list[Tensor]:
    """Return this rank's shard of each layer; parameters begin at 16 bytes, and so do shards."""
    whole = [torch.cat([_filled_up(x.grad.reshape(-1), 4) for x in layer.parameters()]) for layer in twin]
    padded = [_filled_up(x, 4 * me.size) for x in whole]
    return [x.chunk(me.size)[me.rank] for x in padded]


@pytest.mark.parametrize("reshard", [False, True], ids=["keep", "reshard"])
def test_layers_that_ranks_leave_out(several: World, reshard: bool) -> None:
    """Each rank leaves out another layer, and gives zeros for it; shards of two layers are never mixed."""
    several.run(dropped, reshard, runner="asyncio")


async def frozen_and_dropped(me: Rank) -> None:
    twin = blocks().requires_grad_(False)
    layers = ac.overlap.shard_layers(blocks().requires_grad_(False), reshard_after_forward=True)
    for turn in range(2):
        x, same = rows(me.rank, turn).requires_grad_(), rows(me.rank, turn).requires_grad_()
        y, expected = x, same
        for layer in twin[min(2, (me.rank + turn) % 3) :]:
            expected = layer(expected)
        expected.square().mean().backward()
        number = 0
        async for layer in layers:
            y = layer(y) if number >= min(2, (me.rank + turn) % 3) else y
            number += 1
        y.square().mean().backward()
        assert x.grad is not None and same.grad is not None
        assert close(x.grad, same.grad)


def test_frozen_layers_that_ranks_leave_out(several: World) -> None:
    """Backward gathers those again that others need, though this rank sends no gradients."""
    several.run(frozen_and_dropped, runner="asyncio", timeout=patient(20))


async def frozen_differently(me: Rank) -> None:
    model = alike(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    layers = ac.overlap.shard_layers(model)
    model[me.rank % 2].requires_grad_(False)
    on = f"'weight' of layer 0 is frozen on ranks {[*range(0, me.size, 2)]}"
    with raising(ac.CollectiveMismatchError, on, "the same layers on every rank"):
        await through_gathered(layers, rows(me.rank, 0))
    model.requires_grad_(True)
    (await through_gathered(layers, rows(me.rank, 1))).square().mean().backward()
    twin = alike(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    for rank in range(me.size):
        through(twin, rows(rank, 1)).square().mean().backward()
    for own, whole in zip(layers.parameters(), _parts_of_gradients(twin, me), strict=True):
        assert close(own.grad, whole)


def test_layers_that_are_frozen_on_some_ranks_only_are_refused(several: World) -> None:
    """Regression: gradients of different layers were added up, and ranks waited for gradients of no one."""
    several.run(frozen_differently, runner="asyncio", timeout=patient(20))


async def at_different_layers(me: Rank) -> None:
    layers = ac.overlap.shard_layers([nn.Linear(8, 8) for _ in range(3)], ahead=0, lane="crossed")
    loop = reversed(layers) if me.rank else layers
    # Ranks of one host tell the calls apart, by the layer that each names.
    by_calls = me.backend in ("gloo", "memory", "mpi")
    says = ["'layer 0'", "'layer 2'"] if by_calls else ["rank 0 layer 0, rank 1 layer 2"]
    with raising(ac.CollectiveMismatchError, *says, "layers.finish_loop()"):
        async for _ in loop:
            pass


def test_ranks_at_different_layers_are_told(pair: World) -> None:
    """This holds without check="full", too: the shards would have made one layer of the same shape."""
    pair.run(at_different_layers)


async def shared_out_anew(me: Rank) -> None:
    """A lane's last call fails while the caller still holds its layers; the next layers use that lane."""

    async def fail(layers: ac.overlap.ShardedLayers) -> None:
        async for _ in reversed(layers) if me.rank else layers:
            pass

    for _ in range(2):
        layers = ac.overlap.shard_layers([nn.Linear(8, 8) for _ in range(3)], ahead=0, lane="anew")
        with contextlib.suppress(ac.CollectiveError):
            await fail(layers)
        with contextlib.suppress(ac.CollectiveError):
            await ac.barrier(lane="anew")
        del layers


def test_a_failed_call_keeps_no_layers(pair: World) -> None:
    """Regression: its error kept frames that held the layers, so others were refused the layers' lane."""
    pair.run(shared_out_anew)


async def refused_by_one(me: Rank) -> None:
    kept = ac.overlap.shard_layers([nn.Linear(8, 8)], lane="kept")
    if me.rank:
        del kept
    there = "other layers are sharded on the lane 'kept'"
    with raising(ac.InvalidArgumentError if me.rank == 0 else ac.PeerRefusedError, there):
        layers = ac.overlap.shard_layers([nn.Linear(8, 8)], lane="kept")
        async for layer in layers:
            layer(torch.ones(1, 8))
    assert await ac.all_reduce(1, lane="kept") == me.size


def test_layers_that_one_rank_refuses_to_share_out(pair: World) -> None:
    """The others learn of it in their next call on the lane, in which they had waited for this rank."""
    pair.run(refused_by_one)


async def graphed_differently(me: Rank, count: int) -> None:
    """Each rank leaves out another layer: of one set, or of the first and the second of two."""
    whole = alike(nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    sets = [ac.overlap.shard_layers(whole[start : start + 4 // count]) for start in range(0, 4, 4 // count)]
    for turn in range(3):
        x = rows(me.rank, turn)
        for index, layer in enumerate(layer for layers in sets for layer in layers):
            if turn != 1 or index != 1 + me.rank:
                x = layer(x)
        different = raising(ac.CollectiveMismatchError, "every rank has to call each layer", "has called")
        with different if turn == 1 else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of cycles
            (x.square().mean() / me.size).backward(create_graph=True)
        for layers in sets:
            layers.zero_grad()


@pytest.mark.parametrize("count", [1, 2])
def test_graphs_of_gradients_where_ranks_leave_layers_out(pair: World, count: int) -> None:
    """The first layer is refused. Regression: ranks waited for each other in different sets of layers."""
    pair.run(graphed_differently, count, runner="asyncio")


async def backward_raised(me: Rank) -> None:
    """Backward raises on one rank, between the layers, the last of which the loop's variable keeps alive."""
    layers = ac.overlap.shard_layers(blocks())
    for turn in range(3):
        x = rows(me.rank, turn)
        for index, layer in enumerate(layers):
            x = layer(x)
            if turn == 1 and me.rank == 0 and index == 1:
                x.register_hook(divided)
        raised: Any = contextlib.nullcontext()
        if turn == 1:
            raised = raising(ac.PeerRefusedError, "rank 0") if me.rank else raising(ZeroDivisionError)
        with raised:
            (x.square().mean() / me.size).backward()
        assert await ac.all_reduce(turn, op="max") == turn


def divided(_: Tensor) -> None:
    raise ZeroDivisionError("of this rank alone")


def test_a_backward_that_raises_between_layers(several: World) -> None:
    """The others are told although the rank keeps a layer of that loop, and all continue in step."""
    several.run(backward_raised, runner="asyncio")


async def backwards_raised(me: Rank) -> None:
    """Backward raises on all ranks, each at another layer, so each has sent another number of gradients."""
    twin = blocks()
    layers = ac.overlap.shard_layers(blocks())
    for turn in range(3):
        x = rows(me.rank, turn)
        for index, layer in enumerate(layers):
            x = layer(x)
            if turn == 1 and index == me.rank % 3:
                x.register_hook(divided)
        refused = (ZeroDivisionError, ac.PeerRefusedError)
        with raising(refused) if turn == 1 else contextlib.nullcontext():
            (x.square().mean() / me.size).backward()
        if turn == 1:
            layers.zero_grad()
            twin.zero_grad()
        else:
            whole_backward(twin, me.size, turn)
    for part, whole in zip(layers.parameters(), _parts_of_gradients(twin, me), strict=True):
        assert close(part.grad, whole)


def test_backwards_that_raise_at_different_layers(world: World) -> None:
    """Regression: the next backward's gradients were added to those one rank had sent; a single rank hung."""
    world.run(backwards_raised, runner="asyncio")


async def loops_raised(me: Rank, reshard: bool) -> None:
    """One backward covers two loops; each rank gets to another point, and no rank waits for another."""
    twin = blocks()
    layers = ac.overlap.shard_layers(blocks(), reshard_after_forward=reshard)
    for turn, places in enumerate(([(1, 2), (1, 0), (0, 1)], [(0, 0), (1, 0), (1, 1)])):
        for raises in (True, False):
            losses = []
            for loop in range(2):
                x = rows(me.rank, turn)
                for index, layer in enumerate(layers):
                    x = layer(x)
                    if raises and (loop, index) == places[me.rank % 3]:
                        x.register_hook(divided)
                losses.append(x.square().mean() / me.size)
            refused = (ZeroDivisionError, ac.PeerRefusedError)
            with raising(refused) if raises else contextlib.nullcontext():
                sum(losses).backward()
            del losses, layer, x
            assert await ac.all_reduce(raises, op="and") is raises
            if raises:
                layers.zero_grad()
        twin.zero_grad()
        for _ in range(2):
            whole_backward(twin, me.size, turn)
        for part, whole in zip(layers.parameters(), _parts_of_gradients(twin, me), strict=True):
            assert close(part.grad, whole), f"in turn {turn}"
        layers.zero_grad()


@pytest.mark.parametrize("reshard", [False, True])
def test_backwards_that_raise_in_different_loops(several: World, reshard: bool) -> None:
    """Regression: the only rank to reach the second loop stayed ahead; later gradients met its old ones."""
    several.run(loops_raised, reshard, runner="asyncio")


async def left_out_of_the_loss(me: Rank) -> None:
    """The last rank has called the layers, but its second loss does not depend on them."""
    layers = ac.overlap.shard_layers(blocks())
    says = f"backward on rank {me.size - 1} has reached no layer of its loop 2"
    for turn in range(3):
        odd = turn == 1 and me.rank == me.size - 1
        loss = (await through_gathered(layers, rows(me.rank, turn))).square().mean() / me.size
        if odd:
            loss = rows(me.rank, turn).requires_grad_().sum()
        with raising(ac.PeerRefusedError, says) if turn == 1 and not odd else contextlib.nullcontext():
            loss.backward()
        del loss
        assert await ac.all_reduce(not odd, op="and") is (turn != 1)


def test_a_rank_whose_loss_leaves_the_layers_out(several: World) -> None:
    """No rank hangs: all others are told which rank it was, and continue in step with it."""
    several.run(left_out_of_the_loss, runner="asyncio")


class Steps(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        steps: Tensor = self.recurrent(x)[0]
        return steps


#: Layers that keep their inputs, or save their outputs, without help from their loops.
KEEPING = {"LSTM": Steps, "Sigmoid": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())}


def lets_go(me: Rank, name: str) -> None:
    for reshard in (False, True):
        layers = ac.overlap.shard_layers([KEEPING[name]() for _ in range(2)], reshard_after_forward=reshard)
        held = weakref.WeakSet[Tensor]()
        gc.collect()
        gc.disable()
        try:
            for no_grad in (True, False):
                x = rows(me.rank, 0)
                with torch.set_grad_enabled(not no_grad):
                    for layer in layers:
                        held.update(layer.parameters.values())
                        x = layer(x)
                        held.add(x)
                    del layer
                loss = x.square().mean()
                del x, loss
                assert not held, f"{name}, {reshard=}, {no_grad=}"
        finally:
            gc.enable()


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_loop_has_made_goes_with_its_loss(pair: World, name: str) -> None:
    """It is freed at once, with or without a backward, which saves memory and informs the peers."""
    pair.run(lets_go, name, runner="blocking")


class Formed(nn.Module):
    """A layer whose operation saves its weight in another form than the one in which it is sharded."""

    def __init__(self, form: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.ones((4, 4) if dtype.is_complex else (4, 4, 2), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        graph = torch.eye(4, dtype=x.dtype).to_sparse()  # saved as well
        return torch.sparse.mm(graph, x) * self.form(self.weight)


FORMS = {
    "conjugated": (torch.conj, torch.complex64),
    "transposed": (lambda x: x.mH, torch.complex64),
    "real": (torch.real, torch.complex64),
    "imaginary": (torch.imag, torch.complex64),
    "negated": (lambda x: x.conj().imag, torch.complex64),
    "of pairs": (torch.view_as_complex, torch.float32),
}


def in_another_form(me: Rank, form: str) -> None:
    whole = alike(nn.ModuleList(Formed(*FORMS[form]) for _ in range(2)))
    layers = ac.overlap.shard_layers(copy.deepcopy(whole), reshard_after_forward=True)

    def gradient(stages: Any, rank: int) -> Tensor | None:
        x = y = torch.view_as_complex(rows(rank, 0)[:4].reshape(4, 4, 2)).requires_grad_()
        for layer in stages:
            y = layer(y)
        y.abs().square().sum().backward()
        return x.grad

    expected = [gradient(whole, rank) for rank in range(me.size)]
    assert close(gradient(layers, me.rank), expected[me.rank])
    for shard, part in zip(layers.parameters(), _parts_of_gradients(whole, me), strict=True):
        assert close(shard.grad, part)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_layer_saves_in_another_form(pair: World, form: str) -> None:
    """Regression: gathered again for backward, it silently came back in its sharded form."""
    pair.run(in_another_form, form, runner="blocking")


def test_what_a_layer_saves_is_not_changed_in_place() -> None:
    """Autograd checks no versions of what hooks saved. Regression: the gradient was silently wrong."""
    for change in (lambda x: x.mul_(2), lambda x: x + x.relu_()):
        whole = alike(nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(2)]))
        layers = ac.overlap.shard_layers(copy.deepcopy(whole), reshard_after_forward=True)
        with raising(RuntimeError, "modified by an inplace operation"):
            through_changed(whole, change).backward()
        with raising(ac.InvalidArgumentError, "shape [2, 4]", "changed in place", "x = x + y"):
            through_changed(layers, change).backward()


def through_changed(layers: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    for layer in layers:
        x = change(layer(x))
    return x.sum()


async def stepped_between(me: Rank) -> None:
    layers = ac.overlap.shard_layers(blocks(), reshard_after_forward=True)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    first, second = (through(layers, rows(me.rank, turn)).square().mean() / me.size for turn in range(2))
    first.backward()
    optimizer.step()
    with raising(ac.InvalidArgumentError, "layer 3", "changed since its forward", "before the step"):
        second.backward()
    optimizer.zero_grad()
    (through(layers, rows(me.rank, 2)).square().mean() / me.size).backward()


def test_a_backward_after_the_step_of_another(several: World) -> None:
    """Regression: stepped parameters were gathered again; the gradient matched neither old nor new ones."""
    several.run(stepped_between, runner="asyncio")


async def normalized(me: Rank) -> None:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
    layers = ac.overlap.shard_layers(blocks)
    x = rows(me.rank, 0)
    async for layer in layers:
        x = layer(x)
    own = {name: value.clone() for name, value in blocks.named_buffers()}
    state = await layers.full_state_dict()
    first = await ac.broadcast_object(own, src=0)
    for name, value in first.items():
        oracle.same(state[name], value)
        oracle.same(dict(blocks.named_buffers())[name], own[name])


def test_a_state_has_the_buffers_of_the_first_rank(pair: World) -> None:
    """Regression: each rank has its own buffers, so the state differed between ranks."""
    pair.run(normalized)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """Regression: parameters changed before a missing buffer was noticed; a wrong shape was broadcast."""
    layers = ac.overlap.shard_layers([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))])
    state = layers.full_state_dict().wait()
    other = {name: value + 1 for name, value in state.items()}
    for wrong, says in ((None, "is missing"), (torch.ones(1), r"has shape \[1\]")):
        with raising(ac.InvalidArgumentError, "0.1.running_mean", says.replace("\\", "")):
            layers.load_full_state_dict(
                {name: x for name, x in {**other, "0.1.running_mean": wrong}.items() if x is not None}
            )
        for name, value in layers.full_state_dict().wait().items():
            oracle.same(value, state[name])


def test_a_state_of_several_dtypes_is_loaded_exactly() -> None:
    """Regression: tensors behind one of half precision in the same layer were rounded to that, too."""
    layers = ac.overlap.shard_layers([nn.Linear(2, 2)])
    state = {
        "0.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).half(),
        "0.bias": torch.tensor([1 / 3, 2 / 3]),
    }
    layers.load_full_state_dict(state)
    loaded = layers.full_state_dict().wait()
    oracle.same(loaded["0.bias"], state["0.bias"])
    oracle.same(loaded["0.weight"], state["0.weight"].float())


class Counting(nn.Module):
    """A layer with extra state."""

    def __init__(self, seen: object) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


async def with_extra_state(me: Rank) -> None:
    plain, tensors = Counting({"count": 5 + me.rank, "kinds": {"a"}}), Counting(torch.arange(me.rank + 1))
    layers = ac.overlap.shard_layers([nn.Sequential(plain), tensors])
    state = await me.get(layers.full_state_dict())
    assert state["0.0._extra_state"] == {"count": 5, "kinds": {"a"}}
    assert state["1._extra_state"].tolist() == [0]
    whole = nn.ModuleList([nn.Sequential(Counting(None)), Counting(None)])
    whole.load_state_dict(state)
    assert whole[0][0].seen == state["0.0._extra_state"]
    layers.load_full_state_dict({**state, "1._extra_state": torch.arange(7)})
    assert plain.seen == state["0.0._extra_state"]
    assert tensors.seen.tolist() == list(range(7))
    with raising(ac.InvalidArgumentError, "'1._extra_state' is missing"):
        layers.load_full_state_dict({name: x for name, x in state.items() if name != "1._extra_state"})


def test_the_extra_state_of_modules_is_saved_and_loaded(pair: World, runner: str) -> None:
    """Regression: it was sent as a payload, which must match on all ranks; loading raised AttributeError."""
    pair.run(with_extra_state, runner=runner)


def test_an_optimizer_takes_a_state_from_before_its_first_step() -> None:
    """That state is empty. Regression: the optimizer kept its momentum."""
    layers = ac.overlap.shard_layers([nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    before = layers.full_optimizer_state(optimizer).wait()
    for layer in layers:
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert layers.full_optimizer_state(optimizer).wait()["state"]
    layers.load_full_optimizer_state(optimizer, before)
    assert not layers.full_optimizer_state(optimizer).wait()["state"]


async def stepped_otherwise(me: Rank, change: str) -> None:
    layers = ac.overlap.shard_layers(blocks())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.25)
    skips = change == "none"
    for turn in range(2):
        (await through_gathered(layers, rows(me.rank, turn))).square().mean().backward()
        if turn and change == "rate" and me.rank == 0:
            optimizer.param_groups[0]["lr"] = 0.5
        if turn and change == "steps" and me.rank == 0:
            optimizer.step()
        if not (turn and skips and me.rank == 0):
            optimizer.step()
        optimizer.zero_grad()
    rest = "rank 1" if me.size == 2 else f"ranks {', '.join(map(str, range(1, me.size)))}"
    first = "rank 0: none" if skips else "rank 0: checksum"
    own = "This rank's: none" if skips and me.rank == 0 else "This rank's: parts [0, 1, 2, 3]: lr 0."
    with (
        me.case("unlike"),
        raising(ac.CollectiveMismatchError, first, f"{rest}: checksum", own, "schedulers"),
    ):
        await through_gathered(layers, rows(me.rank, 2))
    await layers.finish_loop()
    optimizer.param_groups[0]["lr"] = 0.25
    await through_gathered(layers, rows(me.rank, 3))


@pytest.mark.parametrize("change", ["rate", "steps", "none"])
def test_steps_that_differ_between_ranks_are_refused_in_the_next_loop(several: World, change: str) -> None:
    """Each rank updates its own parts: with different learning rates, they were put together in silence."""
    several.run(stepped_otherwise, change, runner="asyncio")


async def stepped_apart(me: Rank) -> None:
    layers = ac.overlap.shard_layers(blocks())
    parts = list(layers.parameters())
    halves = [torch.optim.SGD(parts[:2], lr=0.1), torch.optim.SGD(parts[2:], lr=0.2)]
    (await through_gathered(layers, rows(me.rank, 0))).square().mean().backward()
    for half in halves[:: 1 if me.rank else -1]:
        half.step()
    (await through_gathered(layers, rows(me.rank, 1))).square().mean().backward()
    halves[1].param_groups[0]["lr"] = 0.1
    halves[min(me.rank, 1)].step()
    own = "This rank's: parts [2, 3]: lr 0.1" if me.rank else "This rank's: parts [0, 1]: lr 0.1"
    with raising(ac.CollectiveMismatchError, "have not made the same optimizer steps", own):
        await through_gathered(layers, rows(me.rank, 2))


def test_optimizers_of_different_parts_may_step_in_any_order_but_on_all_ranks(several: World) -> None:
    """Regression: only their numbers and hyperparameters were compared, in the order of the steps."""
    several.run(stepped_apart, runner="asyncio", timeout=patient(20))


async def stepped_alike(me: Rank) -> None:
    layers, others = ac.overlap.shard_layers(blocks()), ac.overlap.shard_layers(blocks())
    local = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(
        [{"params": [local], "lr": 0.1 + me.rank}, {"params": [*layers.parameters(), *others.parameters()]}]
    )
    for turn in range(3):
        for each in (layers, others):
            (await through_gathered(each, rows(me.rank, turn))).square().mean().backward()
        if me.rank == 0:
            local.grad = torch.ones(2)
            if turn == 1:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await others.clip_grad_norm_(1.0)
                with raising(ac.InvalidArgumentError, "again first"):
                    optimizer.step()
        await others.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    (await through_gathered(layers, rows(me.rank, 3))).sum().backward()


def test_what_does_not_concern_the_layers_is_not_compared_nor_a_step_that_was_refused(pair: World) -> None:
    """A rank's own parameter in the same optimizer may have its own rate and number of steps."""
    pair.run(stepped_alike, runner="asyncio")

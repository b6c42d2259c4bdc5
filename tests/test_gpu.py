"""Tests on one GPU: nccl in a world of one, gloo on CUDA tensors, and stream order. Run by ``make gpu``.

With one GPU nccl sends nothing to any rank: the tests show that its works, streams and events are what
the code takes them for (``standin`` has the same without a GPU). Several GPUs are not tested.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asynccoll as ac
import worlds
from programs import Program, drawn, same_as_alone
from ranks import Rank, raising
from worlds import World

#: Set by ``make gpu``: the file for measurements. With it a missing GPU is a failure.
FIGURES = os.environ.get("ASYNCCOLL_TEST_FIGURES")
DEVICE = "cuda"
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        FIGURES is None and not torch.cuda.is_available(),
        reason="no GPU: `make gpu` on a machine with an NVIDIA GPU and its driver runs these",
    ),
]


@pytest.fixture
def alone() -> World:
    return worlds.world("nccl", 1)


def pair_of(transport: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return two spawned processes: CUDA cannot be used in a fork of a process that has queried it."""
    started = worlds.Starter(worlds.STARTERS["nccl"].start, worlds.STARTERS[transport].options)
    monkeypatch.setitem(worlds.STARTERS, transport, started)
    return worlds.world(transport, 2)


@pytest.fixture(params=["gloo", "memory"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    return pair_of(request.param, monkeypatch)


@pytest.fixture(params=["nccl", "gloo", "memory"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a world of one rank, or of two."""
    transport = request.param
    return worlds.world(transport, 1) if transport == "nccl" else pair_of(transport, monkeypatch)


def figure(what: str, value: float, unit: str) -> None:
    """Add a row to the table that ``make gpu`` prints; the rank that measured it calls this."""
    if FIGURES is not None:
        with Path(FIGURES).open("a") as file:
            file.write(json.dumps([what, value, unit]) + "\n")


def busy(seconds: float = 0.5) -> None:
    """Keep the current stream busy for about that long, with one kernel."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def behind() -> bool:
    """Return whether the current stream still has work to do."""
    return not torch.cuda.current_stream().query()


FORKS = """
import os, sys, torch
{first}
child = os.fork()
if not child:
    print(torch.ones(3, device="cuda").sum().item(), flush=True)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("first", ["", "import asynccoll", "import asynccoll.sync, asynccoll.overlap"])
def test_what_is_imported_leaves_cuda_to_forked_children(first: str) -> None:
    """Workers of a DataLoader, or forked ranks, may be the first to use CUDA."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


# Right results


def of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(12) % 5 + rank).to(dtype).view(4, 3)


async def collectives(me: Rank) -> None:
    """Compare each collective with the same arithmetic on the CPU."""
    every = range(me.size)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        x = of(me.rank, dtype).to(DEVICE)
        total = torch.stack([of(rank, dtype) for rank in every]).sum(0).to(dtype)
        await same(me, f"sum of {dtype}", ac.all_reduce(x), total)
        await same(me, f"gathered {dtype}", ac.all_gather(x), torch.cat([of(rank, dtype) for rank in every]))
    x, mean = of(me.rank).to(DEVICE), torch.stack([of(rank) for rank in every]).mean(0)
    half = of(me.rank).half().to(DEVICE)
    await same(me, "avg", ac.all_reduce(x, op="avg"), mean)
    await same(me, "avg of half", ac.all_reduce(half, op="avg"), mean.half())
    await same(me, "max", ac.all_reduce(x, op="max"), of(me.size - 1))
    await same(me, "or", ac.all_reduce(x > 3, op="or"), of(me.size - 1) > 3)
    await same(me, "transposed", ac.all_reduce(x.t()), mean.t() * me.size)
    await same(me, "broadcast", ac.broadcast(x, src=0), of(0))
    rows = 4 // me.size
    part = slice(me.rank * rows, (me.rank + 1) * rows)
    await same(me, "reduce_scatter", ac.reduce_scatter(x), (mean * me.size)[part])
    await same(me, "all_to_all", ac.all_to_all(x), torch.cat([of(rank)[part] for rank in every]))
    filled = torch.zeros_like(x)
    await same(me, "out", ac.all_reduce(x, out=filled), mean * me.size)
    await same(me, "what out holds", ac.all_reduce(filled * 0 + 1), torch.full((4, 3), float(me.size)))
    with me.case("out, read again"):
        assert torch.equal(filled.cpu(), mean * me.size)
    await same(me, "another lane", ac.all_reduce(x, lane="second"), mean * me.size)
    await same(me, "prepared", ac.prepare("all_reduce", like=x).start(), mean * me.size)
    tree = await ac.all_reduce({"a": x, "b": [x * 2, me.rank + 1]})
    with me.case("a tree"):
        assert torch.equal(tree["a"].cpu(), mean * me.size)
        assert torch.equal(tree["b"][0].cpu(), mean * me.size * 2)
        assert tree["b"][1] == sum(rank + 1 for rank in every)
    with ac.coalescing():
        works = [ac.all_reduce(x * factor) for factor in (1, 2, 3)]
    for factor, work in enumerate(works, 1):
        await same(me, f"coalesced {factor}", work, mean * me.size * factor)
    with me.case("numbers and objects"):
        assert await ac.all_reduce(me.rank + 0.5) == sum(rank + 0.5 for rank in every)
        assert await ac.all_gather_object({"rank": me.rank}) == [{"rank": rank} for rank in every]
    await ac.barrier()
    if me.size > 1:
        await messages(me)
    leaf = of(me.rank).to(DEVICE).requires_grad_()
    (await ac.all_reduce(leaf * 2)).sum().backward()
    with me.case("gradients"):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.cpu(), torch.full((4, 3), 2.0 * me.size))


async def messages(me: Rank) -> None:
    """Exchange tensors on the GPU and on the CPU, and an object, in the order in which they are sent."""
    other = 1 - me.rank
    sent = [ac.send(of(me.rank).to(DEVICE), dst=other), ac.send(of(me.rank), dst=other)]
    sent.append(ac.send_object({"from": me.rank}, dst=other))
    await same(me, "a message", ac.recv(torch.zeros(4, 3, device=DEVICE), src=other), of(other))
    with me.case("messages"):
        assert torch.equal(await ac.recv(torch.zeros(4, 3), src=other), of(other))
        assert await ac.recv_object(src=other) == {"from": other}
    for work in sent:
        await work


async def same(me: Rank, label: str, work: Any, expected: torch.Tensor) -> None:
    with me.case(label):
        got = await work
        assert got.device.type == DEVICE
        assert got.dtype is expected.dtype
        torch.testing.assert_close(got.cpu(), expected)


def test_nccl_in_a_world_of_one(alone: World) -> None:
    """Every kind of collective and payload gives right results."""
    alone.run(collectives, timeout=60)


def test_gloo_on_cuda_tensors(pair: World) -> None:
    """Two ranks share the GPU; their tensors are sent through the host."""
    pair.run(collectives, timeout=60)


# Training


def drawn_programs(count: int, moved: bool) -> list[tuple[str, Program]]:
    """Return programs that CUDA can run (without fused Adagrad); ``moved``: away from `ac.device`."""
    chosen = ((f"seed {seed}", drawn(seed)) for seed in itertools.count(24001))
    there = {"auto_model", "ddp_hook"} if moved else set()  # they move the model back
    possible = (
        (name, program)
        for name, program in chosen
        if program.optimizer != "Adagrad fused" and program.helper not in there
    )
    return list(itertools.islice(possible, count))


def test_drawn_trainings_with_nccl(alone: World) -> None:
    """Parameters match one process on the CPU, for any loop, optimizer, and way to average gradients."""
    alone.run(same_as_alone, drawn_programs(60, moved=False), torch.device(DEVICE), timeout=90)


def test_drawn_trainings_on_cuda_tensors_with_gloo(pair: World) -> None:
    """The same holds for two ranks that share the GPU."""
    pair.run(same_as_alone, drawn_programs(60, moved=True), torch.device(DEVICE), timeout=90)


def odd() -> nn.Sequential:
    """Return a model of which few parameters would be 16-byte aligned in flat memory."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5), nn.GELU(), nn.Linear(5, 3))


def rows_of(ranks: list[int], step: int) -> torch.Tensor:
    every = [torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks]
    return torch.cat(every)


def alone_on_the_cpu(size: int) -> list[torch.Tensor]:
    model = odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(rows_of(list(range(size)), step)).square().mean().backward()
        optimizer.step()
    return [x.detach() for x in model.parameters()]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


async def in_float32(me: Rank) -> None:
    """Train with kernels of cuBLASLt that add biases 16 bytes at a time, whatever their address."""
    expected = alone_on_the_cpu(me.size)
    model = odd().to(DEVICE)
    async with ac.overlap.shard_optimizer(model, fused(model.parameters()), bucket_bytes=64) as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            model(rows_of([me.rank], step).to(DEVICE)).square().mean().backward()
            await optimizer.step()
    with me.case("shard_optimizer"):
        close_to(expected, model.parameters())
    for reshard in (False, True):
        model = odd().to(DEVICE)
        parts = [nn.Sequential(model[i], nn.GELU() if i < 4 else nn.Identity()) for i in (0, 2, 4)]
        layers = ac.overlap.shard_layers(parts, reshard_after_forward=reshard, lane=f"parts, {reshard}")
        inner = fused(layers.parameters())
        for step in range(5):
            inner.zero_grad()
            x = rows_of([me.rank], step).to(DEVICE)
            async for layer in layers:
                x = layer(x)
            (x.square().mean() / me.size).backward()
            inner.step()
        whole = await layers.full_state_dict()
        with me.case(f"shard_layers(reshard_after_forward={reshard})"):
            close_to(expected, [whole[f"{i}.0.{name}"] for i in range(3) for name in ("weight", "bias")])


def close_to(expected: list[torch.Tensor], got: Iterable[torch.Tensor]) -> None:
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.detach().cpu(), y, atol=1e-5, rtol=1e-4)


def test_parameters_in_flat_memory_are_aligned(either: World) -> None:
    """A kernel that finds them misaligned makes the device unusable for the whole process."""
    either.run(in_float32, timeout=60)


async def used_at_once(me: Rank) -> None:
    model = odd().to(DEVICE)
    x = rows_of([0], 0).to(DEVICE)
    expected = model(x)
    values = await ac.broadcast([parameter.detach() for parameter in model.parameters()], src=0)
    for value in values:
        assert value.data_ptr() % 16 == 0
    for layer, weight, bias in zip((model[0], model[2], model[4]), values[::2], values[1::2], strict=True):
        layer.weight.data, layer.bias.data = weight, bias
    torch.testing.assert_close(model(x), expected)
    halves = await ac.all_reduce([torch.ones(n, device=DEVICE, dtype=torch.half) for n in (3, 5, 7)])
    for size, half in zip((3, 5, 7), halves, strict=True):
        assert half.tolist() == [float(me.size)] * size
        assert half.data_ptr() % 16 == 0


def test_results_of_trees_are_aligned(either: World) -> None:
    """Any kernel may read them immediately."""
    either.run(used_at_once)


# Stream order


async def placed(me: Rank) -> None:
    assert ac.backend() == "nccl"
    assert ac.device() == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0


def test_the_device_of_the_rank(alone: World) -> None:
    """The rank's device is the first and only one."""
    alone.run(placed)


async def ordered(me: Rank) -> None:
    side = torch.cuda.Stream()
    for sleeps in (False, True):  # the first run allocates, which may wait for the device
        x = torch.zeros(MIB, device=DEVICE)
        torch.cuda.synchronize()
        if sleeps:
            busy()
        x += 3
        began = time.perf_counter()
        work = ac.all_reduce(x, op="avg")
        got = await work
        host = time.perf_counter() - began
        after = got * 2
        assert behind() or not sleeps, "the host has waited for the device"
        with torch.cuda.stream(side):
            assert await work is got
            beside = got * 3
            assert behind() or not sleeps, "the second stream was not ordered after the result"
        torch.cuda.synchronize()
        assert torch.equal(after.cpu(), torch.full((MIB,), 6.0))
        assert torch.equal(beside.cpu(), torch.full((MIB,), 9.0))
    figure("call and await, device half a second behind", host * 1e3, "ms on the host")


def test_await_orders_streams_and_not_the_host(alone: World) -> None:
    """Later work on each waiter's stream sees the result; the host is not blocked."""
    alone.run(ordered)


async def queued(me: Rank) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(MIB, device=DEVICE)
        busy()
        x += 3
        work = ac.all_reduce(x, lane="opens meanwhile")  # issued by the thread that opens the lane
    got = await work
    after = got * 2
    torch.cuda.synchronize()
    assert torch.equal(after.cpu(), torch.full((MIB,), 6.0))


def test_a_queued_call_follows_its_callers_stream(alone: World) -> None:
    """This holds whichever thread issues it."""
    alone.run(queued)


async def dropped(me: Rank) -> None:
    await ac.all_reduce(torch.ones(8, device=DEVICE))
    source = torch.full((MIB,), 3.0, device=DEVICE)
    out = torch.zeros(MIB, device=DEVICE)
    busy()
    work = ac.all_reduce(source * 1, out=out)  # only the operation holds its input
    overwritten = [torch.zeros(MIB, device=DEVICE) for _ in range(8)]
    await work
    for _ in range(3):
        ac.all_reduce(source * 2).detach()
        overwritten += [torch.zeros(MIB, device=DEVICE) for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), torch.full((MIB,), 3.0))


def test_memory_lives_as_long_as_the_device_needs_it(alone: World) -> None:
    """Memory of dropped inputs is not reused while a kernel reads it."""
    alone.run(dropped)


async def on_host(me: Rank) -> None:
    await ac.all_reduce(torch.ones(8, device=DEVICE))
    busy(1.0)
    work = ac.all_reduce(torch.full((8,), 3.0, device=DEVICE), timeout=0.1)
    await work
    began = time.perf_counter()
    with raising(ac.CollectiveTimeoutError, "on_host of all_reduce"):
        await work.on_host()
    late = time.perf_counter() - began
    assert behind(), "the deadline came after the device"
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    turning = asyncio.create_task(turn())
    while True:
        try:
            got = await work.on_host()
            break
        except ac.CollectiveTimeoutError:
            continue
    turning.cancel()
    assert not behind()
    assert got.tolist() == [3.0] * 8
    assert turns > 10, "on_host has held the loop"
    figure("on_host(), timeout=0.1", late * 1e3, "ms until CollectiveTimeoutError")


def test_on_host_waits_and_has_a_deadline(alone: World) -> None:
    """The event loop runs meanwhile; after a timeout the work can be waited for again."""
    alone.run(on_host)


async def closed(me: Rank) -> None:
    for life in range(3):
        x = torch.zeros(MIB, device=DEVICE)
        busy(0.3)
        x += life
        got = await ac.all_reduce(x, lane="short")
        ac.close_lane("short")
        assert (got * 2).sum().item() == 2.0 * life * MIB


def test_a_lane_that_is_closed_aborts_nothing(alone: World) -> None:
    """It is closed once the device has completed its calls."""
    alone.run(closed)


async def left(me: Rank) -> None:
    x = torch.zeros(MIB, device=DEVICE)
    await ac.all_reduce(x)
    busy()
    x += 3
    got = await ac.all_reduce(x)
    ac.finalize()
    assert not behind(), "finalize has not waited for the device"
    assert got.sum().item() == 3.0 * MIB


def test_finalize_waits_for_the_device() -> None:
    """Awaited results are right, however soon the program leaves the world."""
    with worlds.fresh("nccl", 1) as world:
        world.run(left)


# Measurements


def seconds_of(action: Callable[[], object], times: int) -> float:
    action()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        action()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


async def measured(me: Rank) -> None:
    x = torch.ones(1, device=DEVICE)
    native = torch.distributed.all_reduce

    def theirs() -> None:
        native(x, async_op=True).wait()

    def ours() -> None:
        ac.all_reduce(x, out=x).wait()

    for name, action in (("torch: all_reduce and wait", theirs), ("ours: all_reduce and wait", ours)):
        seconds = seconds_of(action, 500)
        assert seconds < 1.0
        figure(f"{name}, 4 bytes, nccl alone", seconds * 1e6, "us")
    began = time.perf_counter()
    for _ in range(500):
        await ac.all_reduce(x, out=x)
    figure("ours: await, 4 bytes, nccl alone", (time.perf_counter() - began) / 500 * 1e6, "us")
    began = time.perf_counter()
    for _ in range(100):
        await ac.all_reduce(x, out=x).on_host()
    figure("ours: on_host(), 4 bytes, nccl alone", (time.perf_counter() - began) / 100 * 1e6, "us")


def test_figures_of_nccl(alone: World) -> None:
    """They show what a call costs on the host."""
    alone.run(measured, timeout=60)


async def staged(me: Rank) -> None:
    x = torch.ones(4 * MIB, device=DEVICE)
    seconds = seconds_of(lambda: ac.all_reduce(x, out=x).wait(), 5)
    assert x[0].item() == float(me.size) ** 6
    if me.rank == 0:
        figure(f"{me.backend}, 16 MiB on the GPU, two ranks", 16 / 1024 / seconds, "GiB/s")


def test_figures_of_gloo(pair: World) -> None:
    """They show the bandwidth that is left with staging through the host."""
    pair.run(staged, timeout=60)

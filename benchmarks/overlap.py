"""How much communication is hidden behind compute: ours, raw gloo, torch's DDP and Horovod side by side.

    python benchmarks/overlap.py                     on loopback, and as root over a link of 1 Gbit/s
    python benchmarks/overlap.py --where loopback    only there
    make overlap                                     with Horovod as well, which it builds

There are two ranks, of one thread each. In each place it measures:

- **Hidden fraction** of one all_reduce of 16 MiB that is started before, and waited for after, a computation
  that takes about as long: (computation + communication - both overlapped) / the shorter of the two.
- **Time of a training step** of a perceptron of 16 MiB, in buckets of 4 MiB (the first of 1 MiB), compared
  with ``DistributedDataParallel`` with the same buckets, as the median of the ratios within a round. Sharded
  layers are also compared with sharded layers whose gradients are scattered only after backward.

Every round runs everything once, in an order that changes. The figures are printed, and ``--data`` writes
them as JSON for a picture.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import inplaces
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import asynccoll as ac
from asynccoll.bench.peers import horovod
from asynccoll.bench.sidebyside import Peer, Series, side_by_side

SIZE_BYTES = 16 << 20
BUCKETS = {"bucket_bytes": 4 << 20, "first_bucket_bytes": 1 << 20}
WIDTH, DEPTH, ROWS = 1024, 4, 192
#: How many steps to time together, since some ways leave work to the next step.
STEPS = 3


# The hidden fraction of one operation


async def hidden_fraction(rounds: int) -> dict[str, Any]:
    x, weights = torch.zeros(SIZE_BYTES // 4), torch.randn(512, 512)

    async def ours() -> None:
        await ac.all_reduce(x, out=x)

    async def raw() -> None:
        dist.all_reduce(x, async_op=True).wait()

    times = await matching(ours, weights)

    def compute() -> None:
        for _ in range(times):
            weights @ weights

    async def computed() -> None:
        compute()

    async def ours_behind() -> None:
        work = ac.all_reduce(x, out=x)
        compute()
        await work

    async def raw_behind() -> None:
        work = dist.all_reduce(x, async_op=True)
        compute()
        work.wait()

    peers: dict[str, Peer] = {
        "compute": computed,
        "ours": ours,
        "raw": raw,
        "ours behind compute": ours_behind,
        "raw behind compute": raw_behind,
    }
    found = await side_by_side(peers, rounds=rounds, operations=1)
    return {
        "milliseconds": {name: series.median * 1e3 for name, series in found.items()},
        "hidden": {name: hidden(found, name) for name in ("ours", "raw")},
        "hidden at the 10th percentile": {name: hidden_at_best(found, name) for name in ("ours", "raw")},
    }


async def matching(operation: Peer, weights: Tensor) -> int:
    """Return how many products take about as long as ``operation``: the same number on every rank."""
    alone = await side_by_side({"operation": operation}, rounds=5, operations=1)

    async def products() -> None:
        for _ in range(20):
            weights @ weights

    twenty = await side_by_side({"products": products}, rounds=5, operations=1)
    wanted = 20 * alone["operation"].median / twenty["products"].median
    return max(1, round(await ac.all_reduce(wanted, op="avg")))


def hidden(found: dict[str, Series], name: str) -> float:
    """Return the median over rounds of the time saved by overlapping, relative to the most possible."""
    rounds = zip(
        found["compute"].seconds, found[name].seconds, found[f"{name} behind compute"].seconds, strict=True
    )
    return statistics.median(
        (compute + alone - both) / min(compute, alone) for compute, alone, both in rounds
    )


def hidden_at_best(found: dict[str, Series], name: str) -> float:
    """Return the same for the tenth percentiles, which other programs on the machine disturb less."""
    compute, alone, both = (found[key].low for key in ("compute", name, f"{name} behind compute"))
    return (compute + alone - both) / min(compute, alone)


# A training step


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def perceptron_layers() -> list[nn.Module]:
    """Return the same model as a list of layers, each with its activation."""
    parts = list(perceptron().children())
    return [nn.Sequential(*parts[first : first + 2]) for first in range(0, len(parts), 2)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def backward(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def stepping(model: nn.Module, x: Tensor, averaged: Callable[[], Awaitable[object]] | None = None) -> Peer:
    """Return a step; ``averaged`` is called and awaited before the optimizer's."""
    optimizer = sgd(model)

    async def step() -> None:
        backward(model, x)
        if averaged is not None:
            await averaged()
        optimizer.step()

    return step


def ddp_step(x: Tensor, *, hooked: bool) -> Peer:
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=BUCKETS["bucket_bytes"] / (1 << 20))
    if hooked:
        model.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)
    return stepping(model, x)


def overlapped_step(x: Tensor) -> Peer:
    model = perceptron()
    gradients = ac.overlap_gradients(model, **BUCKETS)
    return stepping(model, x, lambda: gradients)


def sharded_steps(x: Tensor) -> Peer:
    model = perceptron()
    optimizer = ac.overlap.shard_optimizer(model, sgd(model), **BUCKETS)

    async def steps() -> None:
        for _ in range(STEPS):
            backward(model, x)
            await optimizer.step()
        await optimizer.gathered()  # part of the measured time

    return steps


def layered_step(x: Tensor) -> Peer:
    """Return a step of sharded layers: each reduce_scatter is issued while backward is still running."""
    layers = ac.overlap.shard_layers(perceptron_layers(), ahead=1)
    optimizer = sgd(layers)

    async def step() -> None:
        optimizer.zero_grad()
        h = x
        async for layer in layers:
            h = layer(h)
        h.square().mean().backward()
        optimizer.step()

    return step


def scattered_after_step(x: Tensor) -> Peer:
    """Return the same by hand, also prefetched, but with gradients scattered only after backward."""
    rank, ranks = ac.get_rank(), ac.get_world_size()
    wholes = [[p.detach() for p in layer.parameters()] for layer in perceptron_layers()]
    parts = [nn.Parameter(torch.cat([p.reshape(-1) for p in whole]).chunk(ranks)[rank]) for whole in wholes]
    optimizer = torch.optim.SGD(parts, lr=0.01, momentum=0.9)

    async def step() -> None:
        optimizer.zero_grad()
        h, flats = x, []
        starts = [partial(ac.all_gather, part.detach()) for part in parts]
        async for flat in ac.overlap.prefetch(starts, ahead=1):
            flats.append(flat.requires_grad_())
            weight, bias = flat.split([WIDTH * WIDTH, WIDTH])
            h = nn.functional.linear(h, weight.view(WIDTH, WIDTH), bias).relu()
        h.square().mean().backward()
        for part, flat in zip(parts, flats, strict=True):
            assert flat.grad is not None
            part.grad = await ac.reduce_scatter(flat.grad)
        optimizer.step()

    return step


def blocking_step(x: Tensor) -> Peer:
    model = perceptron()

    async def averaged() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            ac.all_reduce(parameter.grad, op="avg", out=parameter.grad).wait()

    return stepping(model, x, averaged)


def horovod_step(x: Tensor) -> Peer:
    import horovod.torch as hvd

    model = perceptron()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())

    async def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def training_steps(x: Tensor, *, with_horovod: bool) -> dict[str, Peer]:
    """Return a few training steps of each way, each on its own model."""
    steps = {
        "torch DDP": ddp_step(x, hooked=False),
        "ddp_hook": ddp_step(x, hooked=True),
        "overlap_gradients": overlapped_step(x),
        "shard_layers": layered_step(x),
        "shard_layers, scattered after backward": scattered_after_step(x),
        "blocking, a parameter at a time": blocking_step(x),
        "no communication": stepping(perceptron(), x),
        **({"Horovod": horovod_step(x)} if with_horovod else {}),
    }
    return {"shard_optimizer": sharded_steps(x), **{name: several(step) for name, step in steps.items()}}


def several(step: Peer) -> Peer:
    async def steps() -> None:
        for _ in range(STEPS):
            await step()

    return steps


async def step_times(rounds: int, *, with_horovod: bool) -> dict[str, Any]:
    steps = training_steps(torch.randn(ROWS, WIDTH), with_horovod=with_horovod)
    for one in steps.values():  # DDP rebuilds its buckets in the second step
        await one()
    found = await side_by_side(steps, rounds=rounds, operations=1)
    bases = ("torch DDP", "Horovod", "shard_layers, scattered after backward")
    base = [name for name in bases if name in found]
    return {
        "milliseconds": {name: series.median * 1e3 / STEPS for name, series in found.items()},
        **{f"ratio to {one}": {name: s.ratio_to(found[one]) for name, s in found.items()} for one in base},
    }


# One rank


async def measure(rounds: int) -> dict[str, Any]:
    with_horovod = await join_horovod()
    return {
        "hidden fraction": await hidden_fraction(rounds),
        "training step": await step_times(rounds, with_horovod=with_horovod),
        "with Horovod": with_horovod,
    }


async def join_horovod() -> bool:
    """Start Horovod between the same two ranks, if it is installed here."""
    if horovod.LIBRARY.missing():
        return False
    horovod.join()
    return True


def run_rank(rounds: int) -> None:
    torch.set_num_threads(1)
    ac.initialize("gloo")
    found = asyncio.run(measure(rounds))
    if ac.get_rank() == 0:
        print(json.dumps(found))
    ac.finalize()
    sys.stdout.flush()
    os._exit(0)  # Horovod's rendezvous, if any, has nothing left to wait for


PLACES: dict[str, inplaces.Place] = {
    "loopback": partial(inplaces.on_loopback, ranks=2, each=2),
    "link": partial(inplaces.on_hosts, each=1, rate="1gbit"),
}


def report(place: str, found: dict[str, Any]) -> None:
    one, step = found["hidden fraction"], found["training step"]
    print(f"\n{place}: an all_reduce of 16 MiB behind compute of about the same time")
    for name, took in one["milliseconds"].items():
        print(f"  {name:<34} {took:8.1f} ms")
    for key in ("hidden", "hidden at the 10th percentile"):
        ours, raw = one[key]["ours"], one[key]["raw"]
        print(f"  {key}: ours {ours:.3f}, raw gloo {raw:.3f}, ratio {ours / raw:.3f}")
    ratios = [key for key in step if key.startswith("ratio")]
    print(f"{place}: a training step ({', '.join(ratios)})")
    for name, took in step["milliseconds"].items():
        print(f"  {name:<40} {took:8.1f} ms " + " ".join(f"{step[key][name]:8.3f}" for key in ratios))


if __name__ == "__main__":
    inplaces.main(__file__, __doc__, PLACES, run_rank, report)

"""Cost of one small awaited all_reduce, by layer of the library, compared with the bare ProcessGroup call.

    python benchmarks/anatomy.py

The call is made in a simulated world of two ranks, where nothing is transferred and no peer is waited for:
what remains is the time on this rank's processor. The entry point of each layer is timed with everything
below it; a layer's own time is the difference from the next layer's. Figures are the best of several repeats,
in nanoseconds: on a shared machine, the best says most about the code.

Then, in a real world of one on gloo, the median time to start an operation, from the call to its return;
torch's call and ours alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import timeit
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from growth import join_simulated

import asynccoll as ac
from asynccoll import payload
from asynccoll.backends.c10d.communicator import _ALL_REDUCE
from asynccoll.backends.c10d.completion import MILLISECOND
from asynccoll.plan.spec import ReduceOp
from asynccoll.runtime.process import current
from asynccoll.tensors import autograd
from asynccoll.waiting.started import Started

CALLS = 5_000
NATIVE, WAITED = "native: ProcessGroup.allreduce", "native: Work.wait, bounded"
OPS = "ops: context, lane, block; the Work, what it fills"


def doors(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return each layer's entry point, in the order in which a call passes them."""
    lane = current().world.lane()
    communicator: Any = lane.communicator
    native, options = communicator.native("cpu"), _ALL_REDUCE[ReduceOp.SUM]
    estimate = lane.estimate("all_reduce", x.nbytes)

    def over(started: Started[Any]) -> None:
        for operation in started.operations:
            operation.over = True  # so that the next call forgets the operation

    def issue() -> None:
        start = lambda communicator: communicator.all_reduce(x, ReduceOp.SUM)  # noqa: E731
        lane.issue(estimate, start, x.nbytes).over = True

    return {
        "payload: what it is, whose memory it is": lambda: over(
            payload.all_reduce(lane, x, "sum", out=x, timeout=None)
        ),
        "tensors: gradients, route, memory, call": lambda: over(
            autograd.all_reduce(lane, x, ReduceOp.SUM, x, None)
        ),
        "order: owner, place, operation, deadline": issue,
        NATIVE: lambda: native.allreduce([x], options),
    }


def best(call: Callable[[], Any]) -> float:
    """Return the nanoseconds of one call, excluding the loop around it."""
    empty = min(timeit.repeat(lambda: None, number=CALLS, repeat=5))
    return max(0.0, (min(timeit.repeat(call, number=CALLS, repeat=9)) - empty) / CALLS * 1e9)


async def awaited(x: torch.Tensor) -> tuple[float, float]:
    """Return the nanoseconds of the call and of the await after it, in a running loop."""
    calls, awaits = [], []
    for _ in range(9):
        called = waited = 0.0
        for _ in range(CALLS):
            start = perf_counter()
            work = ac.all_reduce(x, out=x)
            between = perf_counter()
            await work
            called += between - start
            waited += perf_counter() - between
        calls.append(called / CALLS * 1e9)
        awaits.append(waited / CALLS * 1e9)
    return min(calls), min(awaits)


def starting(x: torch.Tensor) -> dict[str, float]:
    """Return the median nanoseconds from call to return; the ways alternate, and waiting is not counted."""
    ways: dict[str, Callable[[], Any]] = {
        "dist.all_reduce(x, async_op=True)": lambda: dist.all_reduce(x, async_op=True),
        "ac.all_reduce(x, out=x)": lambda: ac.all_reduce(x, out=x),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(CALLS):
        for name in sorted(ways, reverse=turn % 2 == 1):
            start = perf_counter()
            work = ways[name]()
            took[name].append(perf_counter() - start)
            work.wait()
    return {name: statistics.median(seconds) * 1e9 for name, seconds in took.items()}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    join_simulated(2)
    x = torch.zeros(1)
    ac.barrier().wait()  # opens the lane
    call, waiting = asyncio.run(awaited(x))
    whole = {OPS: call} | {name: best(door) for name, door in doors(x).items()} | {"": 0.0}
    found = {name: took - inner for (name, took), (_, inner) in pairwise(whole.items())}
    raw = dist.group.WORLD._get_backend(x.device).allreduce([x])
    last = best(lambda: raw.wait(MILLISECOND))
    found["= the call"] = call
    found[WAITED] = last
    found["waiting: the loop's turn, cancellation, the estimate"] = waiting - last
    found["= the await"] = waiting
    found["= both"] = call + waiting
    found["beside it: the bare ProcessGroup call and wait"] = found[NATIVE] + last
    found["beside it: dist.all_reduce(x, async_op=True).wait()"] = best(
        lambda: dist.all_reduce(x, async_op=True).wait()
    )
    for name, took in found.items():
        print(f"{name:<54} {took:7.0f} ns")
    ac.finalize()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, took in starting(x).items():
        print(f"{'to start, alone on gloo: ' + name:<54} {took:7.0f} ns")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

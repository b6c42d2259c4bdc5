"""Where the time of one small awaited all_reduce goes, step by step, beside the bare ProcessGroup call.

    python benchmarks/anatomy.py

In a simulated world of two, so that what is left is what runs on this rank's processor: nothing travels and
nobody is waited for. Each step of ``await ac.all_reduce(x, out=x)`` is timed alone, in the order in which a
call takes them; what is left over is calling from one to the next. Figures are the best of several repeats,
in nanoseconds, which on a shared machine say most about the code.

Then, in a real world of one on gloo, what it takes to start an operation: from the call to its return, by
torch's call and by ours in turn, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import timeit
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from growth import join_simulated

import asynccoll as ac
from asynccoll.backends.c10d.communicator import _ALL_REDUCE
from asynccoll.backends.c10d.completion import MILLISECOND, HostCompletion
from asynccoll.host.call_site import caller
from asynccoll.ops.scopes import current_lane
from asynccoll.order.operation import Operation
from asynccoll.plan.spec import Op, ReduceOp
from asynccoll.runtime.process import current
from asynccoll.tensors.common import route_for
from asynccoll.waiting.work import Work

CALLS = 5_000
NATIVE, WAITED = "native: ProcessGroup.allreduce", "native: Work.wait, bounded"


def steps(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Each step of the call, as it can be made alone."""
    lane = current().world.lane()
    communicator: Any = lane.communicator
    native, options = communicator.native("cpu"), _ALL_REDUCE[ReduceOp.SUM]
    raw = native.allreduce([x], options)
    estimate = lane.estimate("all_reduce", x.nbytes)
    completion = HostCompletion(raw)
    spot = caller()
    operation = Operation(lane, estimate, 1, completion, spot, 1800.0)
    operation.over = True

    def begin() -> None:
        Work((operation,), None, x)._heard = True

    return {
        "which context and lane": lambda: current().world.opened.get(current_lane()),
        "what is planned for such a tensor": lambda: route_for(
            lane, Op.ALL_REDUCE, x, ReduceOp.SUM, x.numel()
        ).plain(x),
        "may this task issue on the lane": lambda: lane._admitted_owner(None),
        NATIVE: lambda: native.allreduce([x], options),
        "completion around the native work": lambda: HostCompletion(raw),
        "note the place of the call": caller,
        "note the operation and its deadline": lambda: Operation(lane, estimate, 1, completion, spot, 1800.0),
        "the Work": begin,
        WAITED: lambda: raw.wait(MILLISECOND),
    }


def best(call: Callable[[], Any]) -> float:
    """Nanoseconds of one call, without those of the loop around it."""
    empty = min(timeit.repeat(lambda: None, number=CALLS, repeat=5))
    return max(0.0, (min(timeit.repeat(call, number=CALLS, repeat=9)) - empty) / CALLS * 1e9)


async def awaited(x: torch.Tensor) -> tuple[float, float]:
    """Nanoseconds of the call, and of the await behind it, in a running loop."""
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
    """Median nanoseconds from the call to its return, in turn; the waiting is not counted."""
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
    found = {name: best(step) for name, step in steps(x).items()}
    last = found.pop(WAITED)
    found["from one of these to the next"] = call - sum(found.values())
    found["= the call"] = call
    found[WAITED] = last
    found["the turn of the loop, cancellation, the estimate"] = waiting - last
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

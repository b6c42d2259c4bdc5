"""The cost of a larger world: our own overhead per call, simulated, and the time of a step, predicted.

    python benchmarks/growth.py

- **Overhead.** In worlds of 64 to 4,096 ranks, this process is one rank, and torch's fake process group,
  which moves no data, stands in for the others. A call then takes only the time of Python code, ours and
  torch's; the difference from the raw call is ours. It should be constant where the result has a fixed size,
  and may grow with the result otherwise.
- **Prediction.** all_reduces between two real ranks give the latency and bandwidth of a message. From these,
  ``asynccoll.testing.network_models`` predicts larger worlds; its prediction for four ranks is compared with
  four real ones.

The figures are printed, and ``--data`` writes them as JSON for a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import asynccoll as ac
from asynccoll.testing import Link
from asynccoll.testing.network_models import Step, best_bucket_bytes, hierarchical, ring, tree

WORLDS = (64, 256, 1024, 4096)
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)

#: An assumed fast network; none can be measured here.
NETWORK_100_GBIT = Link(latency=5e-6, bandwidth=100e9 / 8)
#: The gradients of a model of 25 million parameters, and the time of a step on a fast device: also assumed.
STEP = Step(forward_seconds=0.05, backward_seconds=0.1, gradient_bytes=100e6)

Call = Callable[[], object]


# Own overhead, in a simulated world


def join_simulated(ranks: int) -> None:
    """Make this process rank 0 of ``ranks``, whose other ranks do not exist."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

    assert fake_pg.FakeStore is not None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    here = dist.PrefixStore("asynccoll/1", dist.distributed_c10d._get_default_store())
    for rank in range(1, ranks):  # as if the peers had joined the default lane, and had left
        here.set(f"world/default@0/cpu/here/{rank}", "")
        here.set(f"left/{rank}", "")
    ac.initialize("fake")


def calls_of(ranks: int) -> dict[str, tuple[Call, Call | None]]:
    """Return each collective: our call, and the raw call for the same bytes if there is one."""
    x, part, whole = torch.zeros(1024), torch.zeros(16), torch.zeros(16 * ranks)
    even, fresh = [16] * ranks, torch.empty_like(whole)
    last = ranks - 1
    return {
        "all_reduce 4 KiB": (
            lambda: ac.all_reduce(x, out=x).wait(),
            lambda: dist.all_reduce(x, async_op=True).wait(),
        ),
        "broadcast 4 KiB": (
            lambda: ac.broadcast(x, src=last, out=x).wait(),
            lambda: dist.broadcast(x, last, async_op=True).wait(),
        ),
        "barrier": (lambda: ac.barrier().wait(), lambda: dist.barrier(async_op=True).wait()),
        "broadcast str": (lambda: ac.broadcast("a name", src=0).wait(), None),
        "all_gather 64 B": (
            lambda: ac.all_gather(part, out=whole).wait(),
            lambda: dist.all_gather_single(whole, part, async_op=True).wait(),
        ),
        "all_to_all 64 B": (
            lambda: ac.all_to_all(whole, out=fresh).wait(),
            lambda: dist.all_to_all_single(fresh, whole, even, even, async_op=True).wait(),
        ),
        "reduce_scatter 64 B": (
            lambda: ac.reduce_scatter(whole, out=part).wait(),
            lambda: dist.reduce_scatter_single(part, whole, async_op=True).wait(),
        ),
        "all_reduce number": (lambda: ac.all_reduce(1).wait(), None),
        "all_gather number": (lambda: ac.all_gather(1).wait(), None),
    }


#: Their result or input has a part for each rank, so linear growth is the best possible.
LINEAR = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce number")


def simulate(ranks: int, *, calls: int, rounds: int) -> dict[str, Any]:
    """Return microseconds per call in a world of ``ranks``, ours and raw, and the first call's seconds."""
    join_simulated(ranks)
    start = perf_counter()
    ac.barrier().wait()
    found: dict[str, Any] = {"first call": perf_counter() - start}
    for name, (ours, raw) in calls_of(ranks).items():
        count = max(1, calls * 64 // ranks) if name.startswith(LINEAR) else calls
        mine, theirs = [], []
        for _ in range(rounds):
            mine.append(microseconds(ours, count))
            if raw is not None:
                theirs.append(microseconds(raw, count))
        found[name] = {
            "ours": statistics.median(mine),
            "raw": statistics.median(theirs) if theirs else None,
        }
    ac.finalize()
    dist.destroy_process_group()
    return found


def microseconds(call: Call, count: int) -> float:
    call()
    start = perf_counter()
    for _ in range(count):
        call()
    return (perf_counter() - start) / count * 1e6


def report_overhead(found: dict[int, dict[str, Any]]) -> None:
    print("own overhead: microseconds per call, ours (raw call beside it)")
    print(f"{'ranks':<22}" + "".join(f"{ranks:>18}" for ranks in found))
    for name in next(iter(found.values())):
        cells = []
        for at in found.values():
            one = at[name]
            if isinstance(one, float):
                cells.append(f"{one * 1e6:.0f}")
            else:
                beside = "" if one["raw"] is None else f" ({one['raw']:.1f})"
                cells.append(f"{one['ours']:.1f}{beside}")
        print(f"{name:<22}" + "".join(f"{cell:>18}" for cell in cells))


# Measurements on real ranks, and predictions from them


async def measure(rounds: int) -> dict[int, float]:
    """Return the median seconds of one all_reduce by size in bytes, on the ranks this was started on."""
    found = {}
    for size_bytes in SIZES:
        x, seconds = torch.zeros(size_bytes // 4), []
        count = 20 if size_bytes <= 64 << 10 else 3
        for _ in range(rounds):
            await ac.barrier()
            start = perf_counter()
            for _ in range(count):
                await ac.all_reduce(x, out=x)
            seconds.append((perf_counter() - start) / count)
        found[size_bytes] = statistics.median(seconds)
    return found


def run_rank(rounds: int) -> None:
    torch.set_num_threads(1)
    ac.initialize("gloo")
    found = asyncio.run(measure(rounds))
    if ac.get_rank() == 0:
        print(json.dumps(found), flush=True)
    ac.finalize()


def measured_on(ranks: int, rounds: int) -> dict[int, float]:
    line = [sys.executable, "-m", "asynccoll", "run", "-n", str(ranks), __file__, "--rounds", str(rounds)]
    said = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = next(line for line in said.splitlines() if "{" in line)
    return {int(size): seconds for size, seconds in json.loads(found[found.index("{") :]).items()}


def predict(link: Link) -> dict[str, Any]:
    """Predict a step in larger worlds, over links like the one measured and an assumed fast network."""
    found: dict[str, Any] = {}
    for ranks in (8, *WORLDS):
        ways = {
            "ring, measured link": ring(link, ranks),
            "tree, measured link": tree(link, ranks),
            "ring, 100 Gbit/s": ring(NETWORK_100_GBIT, ranks),
            "nodes of 8, 100 Gbit/s": hierarchical(link, NETWORK_100_GBIT, ranks, 8),
        }
        for name, all_reduce in ways.items():
            best = best_bucket_bytes(STEP, all_reduce)
            found.setdefault(name, {})[ranks] = {"bucket": best, "seconds": STEP.seconds(all_reduce, best)}
    return found


def report_prediction(two: dict[int, float], four: dict[int, float], link: Link) -> dict[str, Any]:
    print(
        f"\na message between two ranks: {link.seconds(0) * 1e6:.0f} us + "
        f"{2**20 / link.bandwidth * 1e6:.0f} us/MiB"
    )
    print(f"{'all_reduce (ms)':>16} {'2 ranks':>9} {'model':>9} {'4 ranks':>9} {'model':>9}")
    for size_bytes, seconds_on_two in two.items():
        row = [seconds_on_two, ring(link, 2)(size_bytes), four[size_bytes], ring(link, 4)(size_bytes)]
        print(f"{size_bytes:>14} B " + " ".join(f"{seconds * 1e3:9.3f}" for seconds in row))
    found = predict(link)
    print("\npredicted: a step of 150 ms of compute and 100 MB of gradients (ms, best bucket in MiB)")
    for name, at in found.items():
        cells = (
            f"{ranks}: {one['seconds'] * 1e3:.0f} ({one['bucket'] / 2**20:g})" for ranks, one in at.items()
        )
        print(f"  {name:<24} " + "   ".join(cells))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=300, help="per round, in a world of 64")
    parser.add_argument("--data", type=Path, help="where to write the figures as JSON")
    given = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(given.rounds)
        return
    torch.set_num_threads(1)
    overhead = {ranks: simulate(ranks, calls=given.calls, rounds=given.rounds) for ranks in WORLDS}
    report_overhead(overhead)
    two, four = measured_on(2, given.rounds), measured_on(4, given.rounds)
    link = Link.fit(two.items())
    predicted = report_prediction(two, four, link)
    if given.data is not None:
        found = {"overhead": overhead, "two": two, "four": four, "predicted": predicted}
        given.data.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

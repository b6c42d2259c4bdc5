"""The horovod backend compared with bare ``hvd.allreduce_async`` and ``hvd.synchronize``.

Run it where Horovod is installed: ``asynccoll run --backend horovod -n 2 benchmarks/horovod_latency.py``.
Every rank does the same. The ways alternate, in an order that changes from round to round, and are compared
within a round. Before the first round, each of our names has been used for tensors of this shape, as in a
training loop, which sends the same tensors in every step; ``bare`` uses a new name each time, as Horovod does
by default. Measured are one tensor at a time and a hundred in flight:

- ``bare``: ``hvd.allreduce_async(x, op=hvd.Sum)`` and ``hvd.synchronize``;
- ``wait``: ``ac.all_reduce(x).wait()``; ``await``: the same under asyncio;
- ``fused`` (only with a hundred): ``ac.all_reduce(list)``, which sends them as one.

For each size it prints the median time of ``bare``, the median ratio of the others to it, and the processor
time per operation of the whole process, including our progress thread and Horovod's threads.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable
from time import perf_counter, process_time

import torch

import asynccoll as ac

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
MANY = 100
#: How many operations use every name of the backend at least once.
WARM = 120
Sample = tuple[float, float]  # seconds, seconds of processor; per operation


def bare(xs: list[torch.Tensor]) -> None:
    import horovod.torch as hvd

    handles = [hvd.allreduce_async(x, op=hvd.Sum) for x in xs]
    for handle in handles:
        hvd.synchronize(handle)


def waited(xs: list[torch.Tensor]) -> None:
    for work in [ac.all_reduce(x) for x in xs]:
        work.wait()


def fused(xs: list[torch.Tensor]) -> None:
    ac.all_reduce(xs).wait()


async def awaited(xs: list[torch.Tensor], count: int) -> Sample:
    used, start = process_time(), perf_counter()
    for _ in range(count):
        await ac.wait_all([ac.all_reduce(x) for x in xs])
    return (perf_counter() - start) / count, (process_time() - used) / count


def blocking(call: Callable[[list[torch.Tensor]], None]) -> Callable[[list[torch.Tensor], int], Sample]:
    def timed(xs: list[torch.Tensor], count: int) -> Sample:
        used, start = process_time(), perf_counter()
        for _ in range(count):
            call(xs)
        return (perf_counter() - start) / count, (process_time() - used) / count

    return timed


PEERS: dict[str, Callable[[list[torch.Tensor], int], Sample]] = {
    "bare": blocking(bare),
    "wait": blocking(waited),
    "await": lambda xs, count: asyncio.run(awaited(xs, count)),
    "fused": blocking(fused),
}


def measure(xs: list[torch.Tensor], peers: list[str], count: int, rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {peer: [] for peer in peers}
    PEERS["wait"](xs, 1 + WARM // len(xs))
    shuffled = random.Random(0)  # noqa: S311 - the same order on every rank
    for _ in range(rounds):
        shuffled.shuffle(peers)
        for peer in peers:
            ac.barrier().wait()
            samples[peer].append(PEERS[peer](xs, count))
    return samples


def report(label: str, samples: dict[str, list[Sample]]) -> None:
    base = samples["bare"]
    seconds = statistics.median(time for time, _ in base)
    used = statistics.median(processor for _, processor in base)
    line = f"{label:>14}  bare {seconds * 1e6:9.0f} us, processor {used * 1e6:9.0f} us"
    for peer in ("wait", "await", "fused"):
        if peer in samples:
            pairs = zip(samples[peer], base, strict=True)
            ratio = statistics.median(mine / theirs for (mine, _), (theirs, _) in pairs)
            own = statistics.median(processor for _, processor in samples[peer])
            line += f" | {peer} x{ratio:.2f}, processor x{own / used:.2f}"
    if ac.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ac.initialize("horovod")
    for name, size_bytes in SIZES.items():
        count = 30 if size_bytes <= 1 << 20 else 3
        xs = [torch.zeros(size_bytes // 4)]
        report(f"1 x {name}", measure(xs, ["bare", "wait", "await"], count, given.rounds))
    for name, size_bytes in list(SIZES.items())[:4]:
        count = 5 if size_bytes <= 65536 else 1
        xs = [torch.zeros(size_bytes // 4) for _ in range(MANY)]
        rounds = max(5, given.rounds // 2)
        report(f"{MANY} x {name}", measure(xs, ["bare", "wait", "await", "fused"], count, rounds))
    ac.finalize()


if __name__ == "__main__":
    main()

"""Millions of mixed calls, with waits cut short at random: whether all results are right, and what grows.

``python tests/soaks.py 1000000 [SEED]`` prints a line for each world, and one for each wrong result.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import numpy as np
import torch

import asynccoll as ac
import asynccoll.testing
from soaking import KINDS, begin

__all__ = ["Found", "Soaked", "mixed", "soak"]

#: Elements per rank: none, one, odd numbers, below and above a slot, and (rarely) many steps.
_SIZES = (0, 1, 3, 64, 1001, 20_011)
_LARGE = (70_001, 400_003)
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int16, torch.bfloat16)
#: How often a rank measures its resources, which takes as long as many calls.
_SAMPLES, _LEAST_BETWEEN = 60, 1000
#: How often the progress of a long run is printed.
_TOLD_EVERY = 50_000
_LANES = ("default", "other", "third")


class Sample(NamedTuple):
    """The resources that a rank holds after so many calls."""

    calls: int
    resident_bytes: int
    descriptors: int
    threads: int


#: The samples of a rank, and its wrong results.
Found = tuple[list[Sample], list[str]]


@dataclass
class Soaked:
    """The outcome of one world's calls."""

    samples: list[list[Sample]]
    wrong: list[str]

    def bytes_per_call(self) -> float:
        """Return the growth of resident memory per call, once settled, on the rank where it grows most."""
        settled = [one[len(one) // 3 :] for one in self.samples]
        return max(
            float(np.polyfit([s.calls for s in one], [s.resident_bytes for s in one], 1)[0])
            for one in settled
        )

    def grown(self, what: str) -> int:
        """Return how many more descriptors, or threads, a rank has at the end than once it had settled."""
        return max(getattr(one[-1], what) - getattr(one[len(one) // 3], what) for one in self.samples)

    def __str__(self) -> str:
        calls = self.samples[0][-1].calls
        return (
            f"{calls:,} calls, {len(self.wrong)} wrong; memory grows by {self.bytes_per_call():+.1f} bytes a "
            f"call, descriptors by {self.grown('descriptors')}, threads by {self.grown('threads')}"
        )


def soak(size: int, calls: int, seed: int, **options: Any) -> Soaked:
    """Make ``calls`` calls in a world of ``size`` ranks; ``options`` are those of ``ac.testing.world``."""
    with asynccoll.testing.world(size, **options) as ranks:
        found = ranks.run(mixed, calls, seed, timeout=60 + calls / 20)
    return Soaked([samples for samples, _ in found], [one for _, wrong in found for one in wrong])


async def mixed(rank: int, calls: int, seed: int) -> Found:
    """Make calls of any kind, size and dtype on three lanes, one by one or with up to 24 in flight."""
    warnings.simplefilter("ignore", ac.UnawaitedWorkWarning)  # a wait that was cut short may not be repeated
    me: Any = SimpleNamespace(rank=rank, size=ac.get_world_size())
    order, own = random.Random(seed), random.Random(f"{seed} {rank}")
    samples, wrong = [_sample(0)], list[str]()
    flying: list[tuple[str, Any, Any]] = []
    most, every = 1, max(_LEAST_BETWEEN, calls // _SAMPLES)
    for turn in range(1, calls + 1):
        flying += _begun(me, order, turn)
        if len(flying) >= most:
            for one in flying:
                wrong += await _wrong(*one, own)
            flying, most = [], order.choice((1, 1, 2, 8, 24))
        if turn % every == 0 or turn == calls:
            samples.append(_sample(turn))
        if turn % _TOLD_EVERY == 0 and rank == 0:
            print(f"{turn:,} of {calls:,} calls, {len(wrong)} wrong", file=sys.stderr, flush=True)
    for one in flying:
        wrong += await _wrong(*one, own)
    return samples, wrong


def _begun(me: Any, order: random.Random, turn: int) -> Iterator[tuple[str, Any, Any]]:
    """Start the call of that turn, the same on every rank, and yield its work and expected result."""
    kind, lane = order.choice((*KINDS, "message")), order.choice(_LANES)
    size = order.choice(_SIZES if order.random() < 0.99 else _LARGE) * me.size
    root, dtype, tag = order.randrange(me.size), order.choice(_DTYPES), order.randrange(3)
    if kind == "avg" and not dtype.is_floating_point:
        dtype = torch.float32
    base = _base(size, dtype)
    what = f"call {turn} on rank {me.rank}, {kind} of {size} {dtype}"
    if kind == "message":
        yield from _around(me, what, base, lane, tag)
    else:
        yield (what, *begin(me, kind, base, root, lane, "cpu"))


@cache
def _base(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that are exact in each of the dtypes, even when summed."""
    return torch.arange(size).remainder(5).to(dtype)


def _around(me: Any, what: str, base: torch.Tensor, lane: str, tag: int) -> Iterator[tuple[str, Any, Any]]:
    """Start a message to the next rank, and one from the previous rank."""
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    yield what, ac.recv(torch.empty_like(base), src=before, tag=tag, lane=lane), base + before
    yield what, ac.send(base + me.rank, dst=after, tag=tag, lane=lane), None


async def _wrong(what: str, work: Any, want: Any, own: random.Random) -> list[str]:
    """Wait for the work, sometimes after a wait that is cut short. Returns what is wrong with the result."""
    way = own.randrange(12)
    if way == 0:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await work
    elif way == 1:
        with anyio.move_on_after(own.random() * 1e-3):
            await work
    elif way == 2 and own.random() < 0.1:  # finding out which rank is late takes longer than everything else
        with suppress(ac.CollectiveTimeoutError):
            work.wait(timeout=0)
    elif way == 3:
        work.detach()
        return []
    got = work.wait() if own.random() < 0.2 else await work
    same = torch.equal(got, want) if isinstance(want, torch.Tensor) else got is None or got == want
    return [] if same else [f"{what}: {got} instead of {want}"]


def _sample(calls: int) -> Sample:
    gc.collect()
    with open("/proc/self/statm") as memory:
        resident = int(memory.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Sample(calls, resident, len(os.listdir("/proc/self/fd")), threading.active_count())


def main(calls: int, seed: int, sizes: Sequence[int] = (2, 4)) -> int:
    bad = 0
    for size in sizes:
        for memory in (True, False):
            found = soak(size, calls, seed, memory=memory)
            print(f"{size} ranks, {'through memory' if memory else 'gloo'}: {found}", *found.wrong, sep="\n")
            sys.stdout.flush()
            bad += bool(found.wrong)
    return bad


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))

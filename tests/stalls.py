"""Stalls drawn from a seed: one rank does not make a call, and all others must learn who, what and where.

`python tests/stalls.py COUNT [SEED]` tries so many on 2 to 8 ranks; with a further argument `simulated`, in
simulated worlds, each with a different order of its threads. `test_stalls.py` tries a few of both. Every rank
draws the same culprit, call, lane, and last call with its line; what each waiter's error must say follows
from that alone. Then the missing call is made, and its result must be right.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.testing import PCT, RandomWalk, simulate
from patience import patient
from ranks import Rank

#: How long after its timeout a waiter gets its error, at most.
TOLD_S = 1.0
LANES = ("gradients", "eval", "data")

#: By name, as in errors: a call in which every rank waits for every other, and its expected result.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "all_reduce": (
        lambda me, **on: ac.all_reduce(torch.tensor([me.rank + 1.0]), **on),
        lambda n: [n * (n + 1) / 2],
    ),
    "all_gather": (lambda me, **on: ac.all_gather(torch.tensor([me.rank]), **on), lambda n: [*range(n)]),
    "reduce_scatter": (lambda me, **on: ac.reduce_scatter(torch.ones(me.size), **on), lambda n: [float(n)]),
    "all_to_all": (
        lambda me, **on: ac.all_to_all(torch.full((me.size,), me.rank), **on),
        lambda n: [*range(n)],
    ),
    "all_gather_object": (
        lambda me, **on: ac.all_gather_object({"r": me.rank}, **on),
        lambda n: [{"r": r} for r in range(n)],
    ),
    "barrier": (lambda me, **on: ac.barrier(**on), lambda n: None),
}


def _plain(result: Any) -> Any:
    return result.tolist() if isinstance(result, torch.Tensor) else result


async def _arrived(me: Rank, work: Any) -> Any:
    """Wait for the result, retrying after timeouts, now that no rank is missing."""
    deadline = host.monotonic() + patient(10)
    while True:
        try:
            return await me.get(work)
        except ac.CollectiveTimeoutError:
            assert host.monotonic() < deadline, "it does not go on"


async def stall(me: Rank, seeds: list[int]) -> list[float]:
    """Run one stall after the other. Returns how long after each timeout this rank got its error."""
    made: Counter[str] = Counter()
    late = []
    for number, seed in enumerate(seeds):
        drawn = random.Random(seed)
        culprit, timeout = drawn.randrange(me.size), drawn.uniform(0.03, 0.15)
        lane, before = drawn.choice(LANES), drawn.choice(LANES)
        operation, last = drawn.choice([*CALLS]), drawn.choice([*CALLS])
        make, result = CALLS[operation]
        line = CALLS[last][0].__code__.co_firstlineno

        await me.get(CALLS[last][0](me, lane=before))
        made[before] += 1
        latest = made[before]
        made[lane] += 1

        if me.rank == culprit:
            for rank in range(me.size):
                if rank != culprit:
                    me.see(f"{number} {rank}")
            work = make(me, lane=lane)
            me.show(f"{number} goes on")
        else:
            start = host.monotonic()
            work = make(me, lane=lane, timeout=timeout)
            try:
                await me.get(work)
                raise AssertionError(f"seed {seed}: nobody was missed")
            except ac.CollectiveTimeoutError as error:
                late.append(host.monotonic() - start - timeout)
                said = f"seed {seed} on rank {me.rank}: {error}"
                assert error.ranks == (culprit,), said
                assert (error.operation, error.lane) == (operation, lane), said
                words = (
                    rf"rank {culprit} \(host .*, pid \d+\) has not called {operation} #{made[lane]} "
                    rf"on lane '{lane}'; "
                    rf"its last call was {last} #{latest} on lane '{before}' at \S*stalls\.py:{line}, "
                    r"\d+\.\d s ago, finished; (it is now in \S+ \(\S+:\d+\)|it does not answer)"
                )
                assert re.search(words, str(error)), f"{said}\nexpected {words}"
            me.show(f"{number} {me.rank}")
            me.see(f"{number} goes on")
        assert _plain(await _arrived(me, work)) == result(me.size), f"seed {seed}"
    return late


def run(
    count: int, seed: int, sizes: tuple[int, ...], places: tuple[str, ...] = ("memory", "gloo")
) -> list[float]:
    """Try ``count`` stalls, distributed over worlds of these sizes, in turn through memory and sockets."""
    import stalls  # the name by which the ranks import this module, even if it is the program
    import worlds

    drawn = random.Random(seed)
    late: list[float] = []
    portions = [(size, place) for size in sizes for place in places]
    for number, (size, place) in enumerate(portions):
        seeds = [drawn.randrange(1 << 32) for _ in range(number, count, len(portions))]
        runner = ("asyncio", "blocking", "trio")[number % 3]
        with worlds.fresh(place, size) as world:
            for results in world.run(stalls.stall, seeds, runner=runner, timeout=30 + 2 * len(seeds)):
                late += results
        print(f"{place}-{size}: {len(seeds)} stalls ({runner})", flush=True)
    return late


def simulated(seed: int, stalls: int = 10) -> list[float]:
    """Try stalls in one simulated world, whose size, transport, nodes and loop are drawn, too."""
    from compositions_waited import driven  # imported here, since the ranks of real worlds do not need it
    from simulated import SimulatedRank

    drawn = random.Random(seed)
    transport, nodes, size = drawn.choice(
        (
            ("memory", 1, drawn.randint(2, 8)),
            ("gloo", 1, drawn.randint(2, 8)),
            ("gloo", 2, 2 * drawn.randint(1, 3)),
        )
    )
    runner = drawn.choice(("asyncio", "trio", "blocking"))
    seeds, seen = [drawn.randrange(1 << 32) for _ in range(stalls)], set[str]()

    async def waits(rank: int) -> list[float]:
        me: Any = SimulatedRank(rank, size, seen, runner)
        return await stall(me, seeds)

    blocking = runner == "blocking"
    report = simulate(
        (lambda rank: driven(waits(rank))) if blocking else waits,
        world_size=size,
        seed=seed,
        loop="none" if blocking else runner,
        transport=transport,
        nodes=nodes,
        schedule=PCT() if drawn.random() < 0.5 else RandomWalk(),
    )
    report.check()
    return [late for rank in report.results.values() for late in rank]


def run_simulated(count: int, seed: int) -> list[float]:
    """Try ``count`` stalls, ten in each world."""
    late: list[float] = []
    for number in range(count // 10):
        late += simulated(seed * 1_000_000 + number)
        if number % 1000 == 999:
            print(f"{10 * (number + 1):,} stalls", flush=True)
    return late


if __name__ == "__main__":
    tried = int(sys.argv[1])
    seed_of_all = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    where = sys.argv[3:]
    found = sorted(run_simulated(tried, seed_of_all) if where else run(tried, seed_of_all, (2, 3, 4, 5, 8)))
    print(
        f"{tried:,} stalls, {len(found):,} waiters: all told right; after the timeout "
        f"{found[len(found) // 2] * 1e3:.0f} ms in the middle, {found[-1] * 1e3:.0f} ms at most"
    )

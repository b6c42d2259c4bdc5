"""Ranks of one host through memory, in simulated worlds: the real engine, each look at a word a switch point.

The environment variable TIMES multiplies the number of orders.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.testing import PCT, Fail, Kill, Report
from by_day import orders
from simulated_memory import ENGINE, check, drawn, expected, flat, interrupted, run, started, told

TIMES = int(os.environ.get("TIMES", "1"))
#: The seconds within which calls complete that wait for no slow rank. A thread that sleeps through a word
#: looks again after 0.1 s.
QUICK_SECONDS = 0.05
SEEDS = orders(40 * TIMES)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_results_are_right_in_one_step_and_in_many(size: int) -> None:
    """All calls are issued together, and each rank waits for them in an order of its own."""
    for seed in SEEDS:
        calls = drawn(seed)

        def main(rank: int, calls: Any = calls, seed: int = seed) -> None:
            works = [started(call, number, rank) for number, call in enumerate(calls)]
            order = list(range(len(calls)))
            random.Random(f"{seed} {rank}").shuffle(order)
            got = {number: told(works[number]) for number in order}
            check(calls, [got[number] for number in range(len(calls))], rank, size)

        report = run(main, seed, world_size=size, loop="none", statements=ENGINE if seed % 3 == 0 else ())
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)


def test_what_one_rank_does_not_await_goes_on() -> None:
    """Rank 0 issues its calls and sleeps; the others wait for all of them meanwhile."""
    for seed in SEEDS:
        calls = drawn(seed, 5)

        async def main(rank: int, calls: Any = calls) -> float:
            works = [started(call, number, rank) for number, call in enumerate(calls)]
            begun = host.monotonic()
            if rank == 0:
                await anyio.sleep(15.0)
            got = [flat(await work) for work in works]
            check(calls, got, rank, 3)
            return host.monotonic() - begun

        report = run(main, seed, world_size=3)
        report.check()
        assert all(seconds < QUICK_SECONDS for rank, seconds in report.results.items() if rank), (
            seed,
            report.results,
        )


def test_a_part_that_nobody_awaits_is_reduced() -> None:
    """In one step, in which each rank has work to do once all have posted theirs."""
    for seed in SEEDS:

        async def main(rank: int, count: int = 20 + 5 * (seed % 40)) -> float:
            call = ("all_reduce", count)
            work, begun = started(call, 0, rank), host.monotonic()
            if rank == 0:
                await anyio.sleep(15.0)
            assert flat(await work) == expected(call, 0, rank, 3)
            return host.monotonic() - begun

        report = run(main, seed, world_size=3)
        report.check()
        waited = [seconds for rank, seconds in report.results.items() if rank]
        assert max(waited) < QUICK_SECONDS, (seed, waited)


def test_nobody_writes_where_others_still_read() -> None:
    """More calls are in flight than there are slots, and one rank is slow to read."""
    for seed in SEEDS:
        calls = [("all_gather", 1 + number % 3) for number in range(30)]

        def main(rank: int, calls: Any = calls) -> None:
            works = [started(call, number, rank) for number, call in enumerate(calls)]
            check(calls, [told(work) for work in works], rank, 2)

        run(main, seed, world_size=2, loop="none", statements=ENGINE, schedule=PCT(depth=6)).check()


def test_several_threads_of_a_rank_wait() -> None:
    """Each thread waits for a call of its own, all on one lane."""
    for seed in SEEDS:
        calls = drawn(seed, 6)

        def main(rank: int, calls: Any = calls) -> None:
            works = [started(call, number, rank) for number, call in enumerate(calls)]
            got: dict[int, list[float]] = {}

            def wait(number: int) -> None:
                got[number] = told(works[number])

            threads = [host.Thread(target=wait, args=(number,)) for number in range(len(calls))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            check(calls, [got[number] for number in range(len(calls))], rank, 2)

        report = run(main, seed, world_size=2, loop="none")
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_an_interrupted_wait_can_be_begun_again(size: int) -> None:
    """Ctrl-C strikes before any statement of the engine."""
    times = 0
    for seed in SEEDS:
        calls = drawn(seed, 4)
        after = random.Random(seed).uniform(0, 3e-4)

        def main(rank: int, calls: Any = calls, after: float = after) -> bool:
            works = [started(call, number, rank) for number, call in enumerate(calls)]
            with interrupted(after if rank == 0 else math.inf) as struck:
                got = [told(work, 3) for work in works]
            check(calls, got, rank, size)
            return bool(struck)

        report = run(main, seed, world_size=size, loop="none", statements=ENGINE)
        if isinstance(report.errors.get(0), KeyboardInterrupt):
            continue  # it struck as the last wait ended
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)
        times += report.results[0]
    assert times > len(SEEDS) // 4


MISMATCHES = [
    lambda rank: ac.all_reduce(torch.ones(40 + rank)),
    lambda rank: ac.all_reduce(torch.ones(3, dtype=torch.int64 if rank else torch.float32)),
    lambda rank: ac.all_reduce(torch.ones(3), op="max" if rank else "sum"),
    lambda rank: ac.broadcast(torch.ones(3), src=int(rank == 0)),
    lambda rank: ac.all_gather(torch.ones(3)) if rank else ac.all_reduce(torch.ones(3)),
    lambda rank: ac.reduce_scatter(torch.ones(6 * (1 + (rank == 1)))),
    lambda rank: ac.barrier() if rank == 1 else ac.all_gather_object("text"),
]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_ranks_that_differ_are_all_told_and_go_on(size: int) -> None:
    """The calls before and after it match, in one step and in many: the lane remains usable."""
    for seed in orders(42 * TIMES):
        calls = drawn(seed, 3)
        differ = MISMATCHES[seed % len(MISMATCHES)]

        async def main(rank: int, calls: Any = calls, differ: Any = differ) -> list[int]:
            before = [started(call, number, rank) for number, call in enumerate(calls)]
            with pytest.raises(ac.CollectiveMismatchError):
                await differ(rank)
            check(calls, [flat(await work) for work in before], rank, size)
            after, lost = [], []
            for number, call in enumerate(calls):
                while len(after) == number:
                    try:
                        after.append(flat(await started(call, number, rank)))
                    except ac.PeerRefusedError:  # it was in flight behind the mismatch, and is issued again
                        lost.append(number)
            check(calls, after, rank, size)
            return lost

        report = run(main, seed, world_size=size, statements=ENGINE if seed % 2 else ())
        report.check()
        assert len({tuple(lost) for lost in report.results.values()}) == 1, (seed, report.results)


def test_who_waits_for_a_killed_rank_is_told_soon() -> None:
    """The rank may die anywhere, even in the middle of a copy; waiting threads and tasks are both told."""
    for seed in orders(60 * TIMES):

        def main(rank: int, seed: int = seed) -> None:
            for number, call in enumerate(drawn(seed, 6)):
                check_one(call, number, rank)

        report = run(main, seed, world_size=3, loop="none", faults=[Kill(1, after_call=1 + seed % 6)])
        judge(report)


def check_one(call: tuple[str, int], number: int, rank: int) -> None:
    assert told(started(call, number, rank)) == expected(call, number, rank, 3)


def judge(report: Report) -> None:
    """Check that the survivors ended soon, either well or with an error that says why."""
    assert report.deadlock is None, report.deadlock
    for error in report.errors.values():
        assert isinstance(error, ac.CollectiveError), error
    assert report.virtual_seconds < QUICK_SECONDS, report.virtual_seconds


def test_who_only_polls_is_told_that_a_rank_cannot_go_on() -> None:
    """Rank 1 fails in its second call before rank 0 makes it, and then waits for rank 0 on another lane."""

    def main(rank: int) -> str:
        for lane in ("default", "other"):
            _ = ac.all_reduce(torch.ones(1), lane=lane).wait()
        if rank == 0:
            host.sleep(0.01)
        work = ac.all_reduce(torch.ones(1))
        while rank == 0 and not work.done():
            host.sleep(1e-3)
        try:
            work.wait()
        except ac.CollectiveError as error:
            _ = ac.all_reduce(torch.ones(1), lane="other").wait()
            return f"{type(error).__name__}: {error}"
        return ""

    for seed in SEEDS:
        report = run(main, seed, world_size=2, loop="none", faults=[Fail(1, after_call=3)])
        report.check()
        assert report.virtual_seconds < 10 * QUICK_SECONDS, (seed, report.virtual_seconds)
        assert report.results[0].startswith("PeerLostError"), report.results
        assert "out of resources" in report.results[1], report.results

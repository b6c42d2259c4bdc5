"""barrier: no rank continues before every rank has called it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

import asynccoll as ac
from ranks import Rank, raising
from worlds import World


async def arrivals(me: Rank, directory: str) -> None:
    for turn in range(me.size):
        if me.rank == turn:
            Path(directory, f"{me.runner}-{turn}").touch()
        with me.case(f"turn {turn}"):
            assert await me.get(ac.barrier()) is None, "barrier gives something"
            assert Path(directory, f"{me.runner}-{turn}").exists(), "went on before the others"


def test_what_was_done_before_is_seen_after(world: World, runner: str, tmp_path: Path) -> None:
    """What any rank did before its barrier is visible to all ranks after theirs."""
    world.run(arrivals, str(tmp_path), runner=runner)


async def waits(me: Rank, directory: str) -> None:
    here = Path(directory, me.runner)
    with me.case("the last one in"):
        if me.rank == 0:
            assert (me.size == 1) or not here.exists()
        work = ac.barrier()
        await me.get(work)
        if me.rank == me.size - 1:
            here.touch()
        await me.get(ac.barrier())
        assert here.exists()


def test_starts_without_being_awaited(world: World, runner: str, tmp_path: Path) -> None:
    """A barrier is already announced to the others before it is awaited."""
    world.run(waits, str(tmp_path), runner=runner)


async def not_yet(me: Rank) -> None:
    with me.case("one is missing"):
        if me.rank == 0:
            work = ac.barrier()
            try:
                work.wait(timeout=0.1)
            except ac.CollectiveTimeoutError:
                late = True
            else:
                late = False
            assert late, "passed a barrier that the other rank has not reached"
            me.show("late")
        else:
            me.see("late")
            work = ac.barrier()
        await me.get(work)


def test_is_not_done_while_one_is_missing(pair: World) -> None:
    """The barrier does not complete before the other rank has called it."""
    pair.run(not_yet)


async def in_the_end(me: Rank, work: ac.Work[None]) -> None:
    """Wait however long the others take: one wait ends at the call's timeout, too soon on a busy machine."""
    while True:
        with suppress(ac.CollectiveTimeoutError):
            return await me.get(work)


async def monitored(me: Rank) -> None:
    late = me.rank in (1, 2)
    if not late:
        for timeout in (0.2, timedelta(milliseconds=200)):
            work = ac.monitored_barrier(timeout=timeout, wait_all_ranks=True)
            with me.case(f"{timeout}"), raising(ac.CollectiveTimeoutError, "rank 1", "rank 2") as caught:
                await me.get(work)
            assert isinstance(caught.error, ac.CollectiveTimeoutError)
            assert {1, 2} <= set(caught.error.ranks)  # on a busy machine another rank may be late, too
            me.show(f"{me.runner} {timeout} {me.rank}")
            await in_the_end(me, work)
    else:
        for timeout in (0.2, timedelta(milliseconds=200)):
            for other in (0, 3):
                me.see(f"{me.runner} {timeout} {other}")
            await me.get(ac.monitored_barrier())
    says = ("timeout", "positive")
    await me.refuses(
        "timeout", ac.InvalidArgumentError, ac.monitored_barrier, timeout=timedelta(0), says=says
    )
    await me.check("afterwards", ac.monitored_barrier, expect=None)


@pytest.mark.processes
def test_a_monitored_barrier_names_all_that_are_late(four: World, runner: str) -> None:
    """Each rank that called raises, with either type of timeout; the barrier completes once all call."""
    four.run(monitored, runner=runner)

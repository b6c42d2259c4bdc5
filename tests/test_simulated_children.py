"""Refused calls of a child task, and the calls of the next child of its name: orders that once lost some."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import elastic
from asynccoll.testing import Kill, simulate
from asynccoll.testing.report import leaves
from asynccoll.waiting import children
from asynccoll.waiting.children import Children

STEPS = 5
#: The step in which a child fails on rank 1.
FAILS = 1

Child = Callable[[int], Awaitable[None]]


async def summed(value: int) -> None:
    x = await ac.all_reduce(torch.tensor([float(value)]))
    assert x.item() == value * ac.get_world_size()


async def steps(child: Child) -> list[list[str]]:
    """Return what each step of one child raises."""
    raised = []
    for step in range(STEPS):
        try:
            async with ac.create_task_group() as tasks:
                tasks.start_soon(child, step, name="child")
        except BaseException as group:
            errors = leaves(group)
            if any(isinstance(error, AssertionError) or not isinstance(error, Exception) for error in errors):
                raise
            raised.append([type(error).__name__ for error in errors])
        else:
            raised.append([])
    return raised


async def both_refuse(rank: int) -> Any:
    """Rank 0's next child fails with its first call in flight, before it has heard of rank 1's failure."""

    async def child(step: int) -> None:
        if step == FAILS + 1 and rank == 0:
            work = ac.all_reduce(torch.tensor([201.0]))
            await anyio.sleep(0.01)
            work.detach()
            raise KeyError("no such key")
        for turn in range(2):
            await summed(100 * step + turn + 1)
        if step == FAILS and rank == 1:
            raise LookupError("disk full")

    return await steps(child)


async def begun_and_lost(rank: int) -> Any:
    """The next child has started a call of several native ones when that call turns out to be lost."""

    async def child(step: int) -> None:
        value = f"{step}" * 2000
        assert await ac.all_gather_object(value) == [value] * ac.get_world_size()
        if step == FAILS:
            if rank == 1:
                raise LookupError("disk full")
            with anyio.move_on_after(0.05):
                await summed(102)
            return
        await summed(100 * step + 2)

    return await steps(child)


async def again(rank: int) -> Any:
    """Rank 0's child catches the refusal and repeats its call, which rank 1's child cannot match."""

    async def child(step: int) -> None:
        await summed(100 * step + 1)
        if step == FAILS and rank == 1:
            raise LookupError("disk full")
        for turn in (2, 3):
            try:
                await summed(100 * step + turn)
            except ac.PeerRefusedError:
                await summed(100 * step + turn)

    return await steps(child)


async def unopened(rank: int) -> Any:
    """Rank 0's children fail before their first call, on a lane that rank 0 has not opened so far."""

    async def child(step: int) -> None:
        if 0 < step < 3 and rank == 0:
            raise LookupError("disk full")
        if step:  # the lane of the first child of a name is closed when the child ends
            await summed(100 * step)

    return await steps(child)


async def unopened_and_left(rank: int) -> Any:
    """As ``unopened``, but rank 1's children do not wait for the lane: their calls are still queued."""

    async def child(step: int) -> None:
        if 0 < step < 3:
            if rank == 0:
                raise LookupError("disk full")
            ac.all_reduce(torch.tensor([100.0 * step])).detach()
            raise KeyError("no such key")
        if step:
            await summed(100 * step)

    return await steps(child)


async def first_unopened(rank: int) -> Any:
    """Rank 0's first child of a name fails before its first call."""

    async def child(step: int) -> None:
        if step == 0 and rank == 0:
            raise LookupError("disk full")
        await summed(100 * step + 1)

    return await steps(child)


async def often(rank: int) -> Any:
    """Rank 1's child continues after each refusal, with calls that rank 0's cannot make."""

    async def child(step: int) -> None:
        if step == FAILS and rank == 0:
            raise LookupError("disk full")
        refused = 0
        for turn in range(3):
            try:
                await summed(100 * step + turn)
            except ac.PeerRefusedError:
                refused += 1
        assert refused == 3 * (step == FAILS and rank == 1)

    return await steps(child)


LOST, REFUSED = ["LookupError"], ["PeerRefusedError"]
#: What each step may raise, on rank 0 and on rank 1.
PROGRAMS: dict[Callable[[int], Any], list[tuple[list[list[str]], list[list[str]]]]] = {
    both_refuse: [([[], [], ["KeyError"], [], []], [[], LOST, REFUSED, [], []])],
    begun_and_lost: [  # no call is lost if the one that rank 0 gave up was held back for comparison
        ([[], [], REFUSED, [], []], [[], LOST, REFUSED, [], []]),
        ([[], [], [], [], []], [[], LOST, [], [], []]),
    ],
    again: [([[], REFUSED, [], [], []], [[], LOST, [], [], []])],
    unopened: [([[], LOST, LOST, [], []], [[], REFUSED, REFUSED, [], []])],
    unopened_and_left: [([[], LOST, LOST, [], []], [[], ["KeyError"], ["KeyError"], [], []])],
    first_unopened: [([LOST, [], [], [], []], [REFUSED, [], [], [], []])],
    often: [([[], LOST, [], [], []], [[], [], [], [], []])],
}


@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_name_that_had_as_many_children_as_there_are_numbers_for_is_new(
    program: Callable[[int], Any], most: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last child that there is a number for may be the one that failed, or the one after it."""
    monkeypatch.setattr(children, "MOST_CHILDREN", most)
    report = simulate(program, world_size=2, transport=transport, timeout=60.0)
    report.check()
    assert (report.results[0], report.results[1]) in PROGRAMS[program]


@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_the_last_child_that_there_are_numbers_for_can_call(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Children, "ended_on", lambda *_: children.MOST_CHILDREN - 1)

    async def main(_rank: int) -> None:
        await summed(1)

    simulate(main, world_size=2, transport=transport, timeout=60.0).check()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("check", ["local", "off"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_next_child_is_right_after_refusals(
    program: Callable[[int], Any], check: str, nodes: int
) -> None:
    """The ranks share a node, where they see each other's calls, or do not; calls are compared or not."""
    report = simulate(program, world_size=2, nodes=nodes, check=check, timeout=60.0)
    report.check()
    assert (report.results[0], report.results[1]) in PROGRAMS[program]


async def in_groups(rank: int) -> Any:
    """Each child lane is first used in a different step, and some ranks leave out some of its calls."""
    pair = [0, 1] if rank < 2 else None

    async def child(step: int) -> None:
        if step == 1 and rank == 1:
            raise LookupError("disk full")
        if step and pair:
            assert await ac.all_reduce(step, group=pair) == 2 * step
        if step == 2 and rank == 2:
            raise LookupError("disk full")
        if step > 1:
            await summed(step)

    return await steps(child)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("check", ["local", "off"])
@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_children_have_never_opened_are_in_step(seed: int, check: str, nodes: int) -> None:
    """In the world and in a group, even where one rank opens a lane long after the others."""
    report = simulate(in_groups, world_size=3, seed=seed, nodes=nodes, check=check, timeout=60.0)
    report.check()
    lost, fine = LOST, [[], [], []]
    assert report.results == {
        0: [[], REFUSED, REFUSED, *fine[:2]],
        1: [[], lost, REFUSED, *fine[:2]],
        2: [[], [], lost, *fine[:2]],
    }


async def _one_line_in_two_tasks(rank: int) -> None:
    async def metric() -> None:
        await ac.all_reduce(1.0, lane="metrics")

    await asyncio.gather(metric(), metric())


def test_a_line_that_runs_in_two_tasks_at_a_time_is_told_apart_from_two_lines() -> None:
    report = simulate(_one_line_in_two_tasks, world_size=2)
    for error in report.errors.values():
        assert isinstance(error, ac.LaneOrderError)
        assert "This line runs in several tasks at a time" in str(error)
        assert "(_one_line_in_two_tasks.metric) issued" in str(error)
    assert report.errors


async def waits_for_another(rank: int) -> None:
    """Rank 1 waits for rank 2, which is killed, and rank 0 for a sibling of the child that does."""

    async def in_all() -> None:
        if rank == 1:
            await ac.all_reduce(torch.ones(1))
        await anyio.sleep_forever()

    async def in_two() -> None:
        if rank == 0:
            await ac.all_reduce(torch.ones(1), group=[0, 1])
        await anyio.sleep_forever()

    async with ac.create_task_group() as tasks:
        tasks.start_soon(in_all, name="in all")
        tasks.start_soon(in_two, name="in two")


def test_a_child_that_is_cancelled_for_a_loss_says_so() -> None:
    """An elastic job took that for a mistake of the program, which it does not try again."""
    report = simulate(waits_for_another, world_size=3, faults=[Kill(2, at=0.5)])
    (refused,) = leaves(report.errors[0])
    assert isinstance(refused, ac.PeerRefusedError)
    assert "its child task 'in two' was cancelled after asynccoll.errors.PeerLostError: rank 2" in str(
        refused
    )
    assert not elastic._is_mistake(refused)

"""Refused calls of one child task, and the calls of the next of its name: schedules that once lost some."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll.testing import simulate
from asynccoll.testing.report import leaves

STEPS = 5
#: In which a child fails on rank 1.
FAILS = 1

Child = Callable[[int], Awaitable[None]]


async def summed(value: int) -> None:
    x = await ac.all_reduce(torch.tensor([float(value)]))
    assert x.item() == value * ac.get_world_size()


async def steps(child: Child) -> list[list[str]]:
    """What each step of one child raises."""
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
    """The next child has begun a call of several native ones when it turns out that it is lost."""

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
    """Rank 0's child catches the refusal and makes its call again, which rank 1's child cannot."""

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


LOST, REFUSED = ["LookupError"], ["PeerRefusedError"]
#: What each step may raise, on rank 0 and on rank 1.
PROGRAMS: dict[Callable[[int], Any], list[tuple[list[list[str]], list[list[str]]]]] = {
    both_refuse: [([[], [], ["KeyError"], [], []], [[], LOST, REFUSED, [], []])],
    begun_and_lost: [  # nothing is lost where the call that rank 0 gave up had been held, to be compared
        ([[], [], REFUSED, [], []], [[], LOST, REFUSED, [], []]),
        ([[], [], [], [], []], [[], LOST, [], [], []]),
    ],
    again: [([[], REFUSED, [], [], []], [[], LOST, [], [], []])],
}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("check", ["local", "off"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_next_child_is_right_after_refusals(
    program: Callable[[int], Any], check: str, nodes: int
) -> None:
    """On ranks that see each other's calls, and on those of two nodes; also where calls are not compared."""
    report = simulate(program, world_size=2, nodes=nodes, check=check, timeout=60.0)
    report.check()
    assert (report.results[0], report.results[1]) in PROGRAMS[program]

"""One child task after another on a lane: no call of the last one is ever matched with one of the next."""

from __future__ import annotations

import contextlib
import itertools

import anyio
import pytest
import torch

import asynccoll as ac
from ranks import Rank, raising
from worlds import World

STEPS = 5
#: In which step children make different numbers of calls: that of the first of a name, whose lane is closed
#: then, or of a later one, whose lane is kept.
FIRST, LATER = 0, 2
#: The tests here share their worlds, so each names its children differently.
tags = itertools.count()


async def sums(me: Rank, step: int, calls: int, got: list[int]) -> None:
    for turn in range(calls):
        x = torch.full((3,), 100.0 * step + turn)
        got.append(int((await ac.all_reduce(x))[0]))


def due(me: Rank, step: int, calls: int) -> list[int]:
    return [me.size * (100 * step + turn) for turn in range(calls)]


async def cancelled(me: Rank, at: int, name: str) -> None:
    """All children of a step are cancelled after different numbers of calls, with the last one in flight."""

    async def child(step: int, calls: int, got: list[int]) -> None:
        await sums(me, step, calls, got)
        if step == at:
            ended.set()
            if me.rank:
                with contextlib.suppress(
                    ac.PeerRefusedError
                ):  # rank 0, which makes no such call, may end first
                    await ac.all_reduce(torch.zeros(3))
            await anyio.sleep_forever()

    ended = anyio.Event()
    for step in range(STEPS):
        calls, got = 3, []
        async with ac.create_task_group() as tasks:
            tasks.start_soon(child, step, calls, got, name=name)
            if step == at:
                await ended.wait()
                await ac.barrier()
                tasks.cancel_scope.cancel()
        with me.case(f"step {step}"):
            assert got == due(me, step, calls)


@pytest.mark.parametrize("at", [FIRST, LATER])
def test_the_next_child_is_in_step_with_others_after_one_was_cancelled(
    several: World, loop: str, at: int
) -> None:
    """Ranks were cancelled in different calls; the next child of that name gets right results on all."""
    several.run(cancelled, at, f"cancelled {next(tags)}", runner=loop)


async def failed(me: Rank, at: int, name: str) -> None:
    """A child fails on rank 0, which continues; the others are told at their next call."""

    async def child(step: int, got: list[int]) -> None:
        await sums(me, step, 2, got)
        if step == at:
            if me.rank == 0:
                raise LookupError("no such file")
            await ac.all_reduce(torch.zeros(3))

    for step in range(STEPS):
        got: list[int] = []
        kind = () if step != at else (LookupError,) if me.rank == 0 else (ac.PeerRefusedError,)
        try:
            async with ac.create_task_group() as tasks:
                tasks.start_soon(child, step, got, name=name)
        except BaseException as group:  # with one exception; Python 3.10 has no name for it
            (error,) = group.exceptions  # type: ignore[attr-defined]
            with me.case(f"what is raised in step {step}"):
                assert isinstance(error, kind), error
                if me.rank:
                    assert "rank 0 refused" in str(error)
                    assert f"child task {name!r} ended with LookupError: no such file" in str(error)
        else:
            assert not kind, step
        with me.case(f"step {step}"):
            assert got == due(me, step, 2)


@pytest.mark.parametrize("at", [FIRST, LATER])
def test_the_others_hear_of_a_child_that_failed(several: World, loop: str, at: int) -> None:
    """They do not wait for its calls until their timeout, and the next child of that name is in step."""
    several.run(failed, at, f"failed {next(tags)}", runner=loop)


async def failed_at_last(me: Rank, at: int, name: str) -> None:
    """On the last rank a child fails after its last call, so no other rank waits for it."""

    async def child(step: int, got: list[int]) -> None:
        await sums(me, step, 2, got)
        if step == at and me.rank == me.size - 1:
            raise LookupError("disk full")

    for step in range(STEPS):
        got: list[int] = []
        with contextlib.ExitStack() as ends:
            if step == at and me.rank == me.size - 1:
                ends.enter_context(raising(BaseException, "1 sub-exception"))
            async with ac.create_task_group() as tasks:
                tasks.start_soon(child, step, got, name=name)
        with me.case(f"step {step}"):
            assert got == due(me, step, 2)


@pytest.mark.parametrize("at", [FIRST, LATER])
def test_a_child_that_fails_behind_its_last_call_spoils_nothing(several: World, loop: str, at: int) -> None:
    """The next child of its name gets right results on all ranks, also if others have started it already."""
    several.run(failed_at_last, at, f"at last {next(tags)}", runner=loop)


async def ended_early(me: Rank, name: str) -> None:
    """The first child of a name is cancelled before its first call on rank 0, and during it on the others."""

    async def child(step: int, got: list[int]) -> None:
        if step == FIRST:
            if me.rank == 0:
                await anyio.sleep_forever()
            work = ac.all_reduce(torch.zeros(3))
            called.set()
            await work
        await sums(me, step, 2, got)

    called = anyio.Event()
    for step in range(STEPS):
        got: list[int] = []
        async with ac.create_task_group() as tasks:
            tasks.start_soon(child, step, got, name=name)
            if step == FIRST:
                if me.rank:
                    await called.wait()
                await ac.barrier()
                tasks.cancel_scope.cancel()
        with me.case(f"step {step}"):
            assert got == ([] if step == FIRST else due(me, step, 2))


def test_the_name_of_a_child_that_has_called_nothing_is_in_step(several: World, loop: str) -> None:
    """Ranks meet by the number of a child, whether earlier ones made any calls or not."""
    several.run(ended_early, f"early {next(tags)}", runner=loop)


async def on_two_lanes(me: Rank, name: str) -> None:
    """A child that fails skips a call of a group and one of the world; other ranks wait in both."""
    pair = ac.new_group([0, me.size - 1])

    async def child(step: int, got: list[int]) -> None:
        await sums(me, step, 2, got)
        if me.rank in pair.ranks:
            assert await ac.all_reduce(step, group=pair) == 2 * step
        if step == LATER:
            if me.rank == 0:
                raise LookupError("no such file")
            await ac.all_reduce(step, group=pair if me.rank in pair.ranks else None)

    for step in range(STEPS):
        got: list[int] = []
        with contextlib.ExitStack() as ends:
            if step == LATER:
                ends.enter_context(raising(BaseException, "1 sub-exception"))
            async with ac.create_task_group() as tasks:
                tasks.start_soon(child, step, got, name=name)
        with me.case(f"step {step}"):
            assert got == due(me, step, 2)


def test_all_lanes_of_a_child_that_failed_hear_of_it(several: World, loop: str) -> None:
    """Waiting ranks are told in every group of ranks in which the child has called."""
    several.run(on_two_lanes, f"two lanes {next(tags)}", runner=loop)


async def in_backward(me: Rank, name: str) -> None:
    """Rank 0's child fails before a backward pass; the other rank waits in its own."""

    async def child(step: int) -> None:
        x = torch.full((2,), float(step + 1), requires_grad=True)
        y = await ac.all_reduce(x)
        if step == LATER and me.rank == 0:
            raise LookupError("no such file")
        y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [me.size, me.size]

    for step in range(STEPS):
        with contextlib.ExitStack() as ends:
            if step == LATER:
                ends.enter_context(raising(BaseException, "1 sub-exception"))
            async with ac.create_task_group() as tasks:
                tasks.start_soon(child, step, name=name)


def test_what_backward_sends_of_a_child_is_refused_and_in_step_too(pair: World, loop: str) -> None:
    """Backward uses its own lane, which continues with the next child of that name."""
    pair.run(in_backward, f"backward {next(tags)}", runner=loop)


async def uneven(me: Rank, name: str) -> None:
    """No child fails, but rank 1's child makes one call more and does not await it."""

    async def child(step: int, got: list[int]) -> None:
        await sums(me, step, 2, got)
        if step == LATER and me.rank == 1:
            left.append(ac.all_reduce(torch.zeros(3)))

    left: list[ac.Work[torch.Tensor]] = []
    for step in range(LATER + 1):
        got: list[int] = []
        async with ac.create_task_group() as tasks:
            tasks.start_soon(child, step, got, name=name)
        assert got == due(me, step, 2)
    found: list[BaseException] = []

    async def next_child() -> None:
        try:
            await ac.all_reduce(torch.ones(3))
        except ac.CollectiveError as error:
            found.append(error)

    async with ac.create_task_group() as tasks:
        tasks.start_soon(next_child, name=name)
    assert found
    told = [str(error) for error in found]
    with me.case("what the next child is told"):
        assert all(isinstance(error, ac.CollectiveMismatchError | ac.PeerRefusedError) for error in found)
        assert all("ranks called different things" in text for text in told), told
    for work in left:
        with raising(ac.CollectiveError):
            await work


def test_a_call_more_of_the_last_child_is_not_taken_for_one_of_the_next(pair: World, loop: str) -> None:
    """The call has the shape of the next one, from the same line or another: it is an error on every rank."""
    pair.run(uneven, f"uneven {next(tags)}", runner=loop)

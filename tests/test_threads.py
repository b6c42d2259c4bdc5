"""Ranks that are threads of one process: each has its own context, and the process has none."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
import oracle
import payloads
import threads
from ranks import Rank, raising


async def collectives(me: Rank) -> None:
    inputs = oracle.by_rank(oracle.counting, me.size, (me.size, 2), torch.float32)
    x, size = inputs[me.rank], me.size
    total, both = oracle.reduced(inputs, "sum"), oracle.concatenated(inputs)
    await me.check("all_reduce", ac.all_reduce, x, expect=total, value=True)
    await me.check("broadcast", ac.broadcast, x, src=size - 1, expect=inputs[-1])
    await me.check("all_gather", ac.all_gather, x, expect=both)
    await me.check("all_to_all", ac.all_to_all, x, expect=oracle.all_to_all(inputs)[me.rank])
    part = oracle.reduce_scatter(inputs, "sum")[me.rank]
    await me.check("reduce_scatter", ac.reduce_scatter, x, expect=part, value=True)
    await me.check("text", ac.all_gather, f"é{me.rank}", expect=[f"é{r}" for r in range(size)])
    objects = [{rank} for rank in range(size)]
    await me.check("objects", ac.all_gather_object, objects[me.rank], codec="pickle", expect=objects)
    trees = payloads.of_all(payloads.nested, size)
    expect = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "sum"), trees)
    await me.check("tree", ac.all_reduce, trees[me.rank], expect=expect, value=True)
    with me.case("where"):
        assert (ac.get_rank(), ac.get_world_size()) == (me.rank, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_between_threads(size: int, runner: str) -> None:
    """The results are the same as between processes, on asyncio, trio and without a loop."""
    threads.run(size, collectives, runner=runner)


async def crossing(me: Rank) -> None:
    works = {}
    for name in ("a", "b") if me.rank % 2 else ("b", "a"):
        works[name] = ac.all_reduce(ord(name), lane=name)
    for name, work in works.items():
        assert await me.get(work) == ord(name) * me.size


def test_lanes_between_threads(runner: str) -> None:
    """Lanes match by name even where ranks share a process."""
    threads.run(3, crossing, runner=runner)


async def same_places(me: Rank) -> list[int]:
    return [await me.get(ac.all_reduce(10**me.rank)) for _ in range(50)]


def test_threads_are_not_mixed_up() -> None:
    """Fifty sums on four concurrent threads: each rank is one thread."""
    assert threads.run(4, same_places) == [[1111] * 50] * 4


def foreign_thread(me: Rank) -> None:
    heard: list[Any] = []

    def foreign() -> None:
        try:
            ac.all_reduce(1).wait()
        except ac.NotInitializedError as error:
            heard.append(str(error))

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert len(heard) == 1, "a foreign thread has a context"
    assert "thread" in heard[0]
    assert ac.all_reduce(1).wait() == me.size


def test_a_foreign_thread_is_refused() -> None:
    """A thread that is not a rank gets an error, and never acts as one."""
    threads.run(2, foreign_thread)


def no_default(me: Rank) -> None:
    assert not dist.is_initialized(), "ranks that are threads set a default group"


def test_no_process_default() -> None:
    """No default group or context is set for the process, during the run or after it."""
    threads.run(2, no_default)
    assert not ac.is_initialized()
    assert not dist.is_initialized()
    assert ac.get_world_size() == 1
    assert ac.all_reduce(5).wait() == 5


def many_times(me: Rank) -> None:
    with raising(ac.InvalidArgumentError, "already"):
        ac.initialize("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert ac.all_reduce(1).wait() == me.size


def test_worlds_of_threads_come_and_go() -> None:
    """Ten worlds in succession leave no threads behind."""
    threads.run(2, many_times)
    before = threading.active_count()
    for _ in range(10):
        threads.run(2, many_times)
    assert threading.active_count() <= before + 1


def leaves_in_a_task(me: Rank) -> None:
    async def leave() -> None:
        ac.finalize()

    asyncio.run(leave())
    assert not ac.is_initialized()
    ac.finalize()  # there is nothing to leave
    with raising(ac.InvalidArgumentError, "rank"):  # and nothing keeps it from joining
        ac.initialize("gloo", store=dist.HashStore(), rank=me.size, world_size=me.size)


def test_a_rank_that_leaves_in_a_task_has_left() -> None:
    """The task runs with a copy of the thread's context variables."""
    threads.run(2, leaves_in_a_task)


def fails_on_one(me: Rank) -> None:
    assert me.rank == 0, "as it is to"


def test_a_case_that_fails_leaves_no_ranks_to_later_tests() -> None:
    with pytest.raises(threads.ThreadsError, match="as it is to"):
        threads.run(2, fails_on_one)
    assert ac.get_world_size() == 1


def nothing(me: Rank) -> None:
    """A case that drops no work."""


def test_handles_that_earlier_tests_left_are_none_of_a_case() -> None:
    """In a reference cycle, they are deleted whenever garbage is collected."""
    left: list[Any] = [ac.all_reduce(1)]
    left.append(left)
    del left
    with pytest.warns(ac.UnawaitedWorkWarning):
        threads.run(2, nothing)

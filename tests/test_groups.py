"""Groups: created once per set of ranks, accepted in every form, closed to non-members."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import asynccoll as ac
import oracle
from asynccoll.testing import simulate
from ranks import NEED_EVERY_RANK, Rank, raising
from worlds import World


def total(ranks: list[int]) -> int:
    """Return the sum of the ranks' numbers, each 10 to the power of its rank."""
    return sum(10**rank for rank in ranks)


def entries(name: str) -> int:
    """Return how many threads ("task") or descriptors ("fd") this process has."""
    return len(list(Path("/proc/self", name).iterdir()))


async def halves(me: Rank) -> None:
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2], [3], [3, 1, 0]):
        group = ac.new_group(ranks)
        inside = me.rank in ranks
        with me.case(f"where in {ranks}"):
            want = sorted(ranks).index(me.rank) if inside else -1
            assert ac.get_rank(group) == want, f"rank {ac.get_rank(group)}"
            assert ac.get_world_size(group) == (len(ranks) if inside else -1)
        if inside:
            await me.check(f"sum in {ranks}", ac.all_reduce, 10**me.rank, group=group, expect=total(ranks))
        else:
            await me.refuses(
                f"sum outside {ranks}",
                ac.InvalidArgumentError,
                ac.all_reduce,
                1,
                group=group,
                says=(str(me.rank), str(sorted(ranks))),
            )
    await me.check("the world", ac.all_reduce, 10**me.rank, expect=total([0, 1, 2, 3]))


def test_new_group(four: World, runner: str) -> None:
    """Members get their sum; a non-member's call raises an error that lists the members."""
    four.run(halves, runner=runner)


def test_a_group_of_torchs_that_was_destroyed() -> None:
    with raising(ac.InvalidArgumentError, "was destroyed"):
        ac.get_rank(dist.ProcessGroup(dist.HashStore(), 0, 1))


async def by_index(me: Rank) -> None:
    group = ac.new_group([1, 2, 3])
    if me.rank:
        index, tail = me.rank - 1, {"group": group}
        inputs = oracle.by_rank(oracle.counting, 3, (3, 2), torch.float32)
        x, whole, both = inputs[index], oracle.reduced(inputs, "sum"), oracle.concatenated(inputs)
        last, check = index == 2, me.check
        await check("reduce", ac.reduce, x, group_dst=2, **tail, expect=whole if last else None, value=True)
        await check("broadcast", ac.broadcast, x, group_src=2, **tail, expect=inputs[2])
        await check("gather", ac.gather, x, group_dst=0, **tail, expect=both if index == 0 else None)
        await check("scatter", ac.scatter, inputs if last else None, group_src=2, **tail, expect=x)
        await check("broadcast_object", ac.broadcast_object, index, group_src=1, **tail, expect=1)
        mine = ["a", "b", "c"] if index == 1 else None
        await check("scatter_object", ac.scatter_object, mine, group_src=1, **tail, expect="abc"[index])
        await check(
            "gather_object", ac.gather_object, index, group_dst=0, **tail, expect=None if index else [0, 1, 2]
        )
        if index == 0:
            await check("send", ac.send, x, group_dst=2, **tail, expect=None)
        elif last:
            await check("recv", ac.recv, x, group_src=0, **tail, expect=inputs[0])
        says = ("group_src=3", "[1, 2, 3]", "0 to 2")
        await me.refuses("index", ac.InvalidArgumentError, ac.broadcast, x, group_src=3, **tail, says=says)
        says = ("src=1", "group_src=0")
        await me.refuses(
            "both", ac.InvalidArgumentError, ac.scatter, x, src=1, group_src=0, **tail, says=says
        )
        await me.refuses("neither", ac.InvalidArgumentError, ac.send, x, **tail, says=("dst=", "neither"))
        await me.refuses("type", ac.PayloadTypeError, ac.reduce, x, group_dst="0", **tail, says=("'0'",))
    await me.check("the world", ac.broadcast, me.rank, group_src=3, expect=3)


def test_a_root_by_its_index_in_the_group(four: World, runner: str) -> None:
    """group_src and group_dst work as in torch; bad ones are refused, and the lane still works."""
    four.run(by_index, runner=runner)


async def subgroups(me: Rank) -> None:
    mine, groups = ac.new_subgroups(2)
    with me.case("which"):
        assert [group.ranks for group in groups] == [(0, 1), (2, 3)]
        assert mine is groups[me.rank // 2]
    await me.check("sum", ac.all_reduce, 10**me.rank, group=mine, expect=total(list(mine.ranks)))
    with me.case("of each node"):
        mine, groups = ac.new_subgroups()
        assert [group.ranks for group in groups] == [(0, 1, 2, 3)]
    with me.case("refused"):
        for size in (3, 0, 8, "2"):
            with raising(ac.InvalidArgumentError, repr(size), "4"):
                ac.new_subgroups(size)


def test_new_subgroups(four: World) -> None:
    """Each rank is in one group of consecutive ranks; by default there is a group per node."""
    four.run(subgroups)


class Kept(torch.nn.Module):
    """A layer that holds the group in which it sums."""

    def __init__(self, group: ac.Group) -> None:
        super().__init__()
        self.group = group


async def copied(me: Rank) -> None:
    group = ac.new_group([0, 1])
    for way in (copy.copy, copy.deepcopy):
        with me.case(way.__name__):
            assert way(Kept(group)).group is group
    await me.check("sum", ac.all_reduce, 10**me.rank, group=copy.deepcopy(group), expect=total([0, 1]))
    with me.case("pickled"), raising(ac.PayloadTypeError, "Group [0, 1]", "new_group(ranks)"):
        pickle.dumps(Kept(group))


def test_a_copied_model_has_the_same_group(pair: World) -> None:
    """Two objects for one set of ranks would open its lanes twice; another process has neither."""
    pair.run(copied)


async def told_of_a_bad_index(me: Rank) -> None:
    # Rank 1 is the source: otherwise a rank could have its own value back before it is told of a refusal.
    index = 7 if me.rank == 1 else 1
    error = ac.InvalidArgumentError if me.rank == 1 else ac.PeerRefusedError
    await me.refuses("index", error, ac.broadcast, me.rank, group_src=index, says=("group_src=7",))
    await me.check("afterwards", ac.broadcast, me.rank, group_src=1, expect=1)


def test_a_bad_index_of_one_rank_is_told(pair: World) -> None:
    """The peers, which made the call, do not wait for it."""
    pair.run(told_of_a_bad_index)


async def every_collective(me: Rank) -> None:
    ranks = [1, 3]
    group = ac.new_group(ranks)
    if me.rank not in ranks:
        return
    index = ranks.index(me.rank)
    inputs = oracle.by_rank(oracle.counting, 2, (4, 2), torch.float32)
    x = inputs[index]
    tail: dict[str, Any] = {"group": group}
    whole, both = oracle.reduced(inputs, "sum"), oracle.concatenated(inputs)
    last = me.rank == 3
    check = me.check
    await check("all_reduce", ac.all_reduce, x, **tail, expect=whole, value=True)
    await check("reduce", ac.reduce, x, dst=3, **tail, expect=whole if last else None, value=True)
    await check("broadcast", ac.broadcast, x, src=3, **tail, expect=inputs[1])
    await check("all_gather", ac.all_gather, x, **tail, expect=both)
    await check("gather", ac.gather, x, dst=3, **tail, expect=both if last else None)
    await check("scatter", ac.scatter, inputs if last else None, src=3, **tail, expect=x)
    part = oracle.reduce_scatter(inputs, "sum")[index]
    await check("reduce_scatter", ac.reduce_scatter, x, **tail, expect=part, value=True)
    swapped = oracle.all_to_all(inputs)[index]
    await check("all_to_all", ac.all_to_all, x, **tail, expect=swapped)
    await check("permute", ac.permute, x, [(1, 3), (3, 1)], **tail, expect=inputs[1 - index])
    await check("barrier", ac.barrier, **tail, expect=None)
    await check("text", ac.all_gather, f"é{me.rank}", **tail, expect=["é1", "é3"])
    await check("object", ac.all_gather_object, [me.rank], **tail, expect=[[1], [3]])
    await check("from 3", ac.broadcast_object, me.rank, src=3, **tail, expect=3)
    if last:
        await check("recv", ac.recv, x, src=1, **tail, expect=inputs[0])
    else:
        await check("send", ac.send, x, dst=3, **tail, expect=None)
    for name, call in {"broadcast": ac.broadcast, "scatter": ac.scatter}.items():
        label = f"{name} from outside"
        await me.refuses(label, ValueError, call, x, src=0, **tail, says=("src=0", "[1, 3]"))
    pairs = [(0, 1)]
    await me.refuses("pairs", ValueError, ac.permute, x, pairs, **tail, says=("0", "[1, 3]"))


def test_ranks_are_global_in_every_collective(four: World, runner: str) -> None:
    """src, dst and pairs are global ranks in a group, too."""
    four.run(every_collective, runner=runner)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, "expected 0, as this is a world of one; .*asynccoll run"), (3, "expected 0 to 2")],
)
def test_a_rank_that_is_not_there_is_refused_with_those_that_are(size: int, expected: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ac.InvalidArgumentError, match=rf"src=3 is not in the group; {expected}"):
            _ = ac.broadcast(1.0, src=3).wait()

    simulate(main, world_size=size, loop="none").check()


async def cached(me: Rank) -> None:
    ranks = [0, 1] if me.rank < 2 else [2, 3]
    me.prepare([0, 1], [2, 3])
    await me.get(ac.all_reduce(1, group=ranks))
    await me.get(ac.barrier())  # where ranks are threads of one process, this counts all their event loops
    threads, descriptors = entries("task"), entries("fd")
    for turn in range(1000):
        order = ranks if turn % 2 else ranks[::-1]
        got = await me.get(ac.all_reduce(turn, group=order))
        assert got == 2 * turn, f"turn {turn}: {got}"
    assert entries("task") <= threads + 1
    assert entries("fd") <= descriptors + 2
    assert ac.new_group([0, 1]) is ac.new_group((1, 0))


def test_a_thousand_calls_with_a_rank_list_make_one_group(four: World) -> None:
    """The numbers of threads and descriptors stay constant; the order of the list does not matter."""
    four.run(cached, timeout=60)


async def ad_hoc(me: Rank) -> None:
    ranks = [0, 3]
    if me.rank in ranks and me.backend in NEED_EVERY_RANK:
        await me.refuses(
            "not made", ac.UnsupportedOpError, ac.all_reduce, 1, group=ranks, says=("new_group",)
        )
    elif me.rank in ranks:
        got = await me.get(ac.all_reduce(10**me.rank, group=ranks))
        assert got == total(ranks)
        assert ac.get_rank(ranks) == ranks.index(me.rank)
    assert await me.get(ac.all_reduce(1)) == me.size


def test_a_rank_list_opens_among_its_members_alone(four: World, runner: str) -> None:
    """Other ranks need not know of the group; a backend that needs them says so."""
    four.run(ad_hoc, runner=runner)


async def native(me: Rank) -> None:
    theirs = dist.new_group([0, 2])
    me.prepare([0, 2])
    if me.rank in (0, 2):
        await me.check("native", ac.all_reduce, 10**me.rank, group=theirs, expect=total([0, 2]))
    await me.check("default", ac.all_reduce, 10**me.rank, group=dist.group.WORLD, expect=total([0, 1, 2, 3]))
    x = torch.ones(2)
    dist.all_reduce(x)
    oracle.same(x, torch.full((2,), 4.0))


@pytest.mark.processes
def test_native_process_groups(four: World) -> None:
    """A torch group is accepted as group=, and torch's own calls still work alongside ours."""
    four.run(native)


async def mesh(me: Rank) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = [0, 2] if me.rank % 2 == 0 else [1, 3]
    tp = [0, 1] if me.rank < 2 else [2, 3]
    me.prepare([0, 2], [1, 3], [0, 1], [2, 3])
    await me.check("dp", ac.all_reduce, 10**me.rank, group=grid["dp"], expect=total(dp))
    await me.check("tp", ac.all_reduce, 10**me.rank, group=grid["tp"], expect=total(tp))
    with me.case("rank in dp"):
        assert ac.get_rank(grid["dp"]) == dp.index(me.rank)
        assert ac.get_world_size(grid["tp"]) == 2
    await me.refuses("2-d", ValueError, ac.all_reduce, 1, group=grid, says=("DeviceMesh", '["dp"]'))


@pytest.mark.processes
def test_device_meshes(four: World) -> None:
    """One dimension of a mesh is a group; two dimensions are refused."""
    four.run(mesh)


async def bad_groups(me: Rank) -> None:
    call = ac.all_reduce
    await me.refuses("outside", ValueError, call, 1, group=[0, 9], says=("9", "3"))
    await me.refuses("negative", ValueError, call, 1, group=[-1, 0], says=("-1",))
    await me.refuses("twice", ValueError, call, 1, group=[0, 0], says=("once",))
    await me.refuses("empty", ValueError, call, 1, group=[], says=("at least one",))
    await me.refuses("text", TypeError, call, 1, group="world", says=("str", "DeviceMesh"))
    await me.refuses("number", TypeError, call, 1, group=3, says=("int",))
    await me.refuses("floats", TypeError, call, 1, group=[0.0, 1.0], says=("0.0",))
    await me.check("afterwards", call, 1, expect=me.size)


def test_what_is_no_group_is_refused(four: World) -> None:
    """Unknown and repeated ranks and other types give typed errors."""
    four.run(bad_groups)


async def at_once(me: Rank) -> None:
    rows, columns = [0, 1] if me.rank < 2 else [2, 3], [0, 2] if me.rank % 2 == 0 else [1, 3]
    me.prepare([0, 1], [2, 3], [0, 2], [1, 3])
    works = []
    for turn in range(20):
        works.append((ac.all_reduce(turn * 10**me.rank), turn * total([0, 1, 2, 3])))
        works.append((ac.all_reduce(turn * 10**me.rank, group=rows), turn * total(rows)))
        works.append((ac.all_reduce(turn * 10**me.rank, group=columns), turn * total(columns)))
    for work, expect in reversed(works):
        got = await me.get(work)
        assert got == expect, f"{got} != {expect}"


def test_overlapping_groups_in_flight_together(four: World, runner: str) -> None:
    """The world, rows and columns are used together; each gives its own sums."""
    four.run(at_once, runner=runner)

"""Groups over several hosts whose ranks share memory: within a host through memory, between hosts by gloo.

The hosts of these worlds come from the launcher's variables; all ranks are on this machine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import asynccoll as ac
import oracle
import worlds
from asynccoll.ops.explaining import explain_offline
from asynccoll.runtime.process import current
from ranks import Rank, raising
from test_lanes import bad_avg
from test_nodes import large
from worlds import World

#: One rank acts for its host; each rank has a part, of equal or unequal size; gloo reduces between hosts.
NUMELS = (1, 1009, 60_000, 40_003, 600_000)


def way(name: str, x: torch.Tensor, **call: Any) -> str:
    return ac.explain(name, x, **call).via


@pytest.fixture(
    scope="module",
    params=[
        (0, 0, 1, 1),
        pytest.param((0, 1, 0, 1), marks=pytest.mark.nightly),
        pytest.param((0, 0, 0, 1, 1, 1), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def hosts(request: pytest.FixtureRequest) -> World:
    """Two hosts, of two ranks (also alternating) or of three; calls go by host at any size."""
    return worlds.world("memory", len(request.param), nodes=request.param, by_node=True)


async def reductions(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        inputs = oracle.by_rank(oracle.counting, me.size, (1009,), dtype)
        for op in oracle.reductions(dtype):
            exact = 0.0 if op != "avg" else oracle.epsilon(dtype)
            call: dict[str, Any] = {"op": op, "value": True, "rtol": exact}
            total = oracle.reduced(inputs, op)
            for numel in (1009, 40_004):
                mine, expected = large(inputs[me.rank], numel), large(total, numel)
                await me.check(f"{op} of {numel} {name}", ac.all_reduce, mine, expect=expected, **call)
            rows = inputs[me.rank][:300].repeat(me.size)
            await me.check(
                f"reduce_scatter, {op} of {name}", ac.reduce_scatter, rows, expect=total[:300], **call
            )


def test_every_dtype_and_reduction(hosts: World) -> None:
    """Results equal NumPy's; the input is unchanged."""
    hosts.run(reductions, timeout=60)


async def movements(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for numel in (1, 1009, 70_001):
            inputs = [large(x, numel) for x in oracle.by_rank(oracle.counting, me.size, (7,), dtype)]
            mine = inputs[me.rank]
            await me.check(f"all_gather {numel} {name}", ac.all_gather, mine, expect=torch.cat(inputs))
            for src in range(me.size):
                await me.check(
                    f"broadcast {numel} {name} {src}", ac.broadcast, mine, src=src, expect=inputs[src]
                )


def test_every_movement(hosts: World) -> None:
    hosts.run(movements, timeout=60)


async def in_every_form(me: Rank) -> None:
    for numel in NUMELS:
        x = torch.arange(float(numel)) % 11 + me.rank
        others = [torch.arange(float(numel)) % 11 + rank for rank in range(me.size)]
        for name in ("all_reduce", "all_gather", "broadcast"):
            assert way(name, x) == "nodes"
        assert way("reduce_scatter", x.repeat(me.size)) == "nodes"
        assert way("reduce_scatter", x.repeat(me.size).bfloat16()) != "nodes"  # it is rounded once
        total = sum(others[1:], others[0].clone())
        out = torch.empty_like(x)
        assert await me.get(ac.all_reduce(x, out=out)) is out
        oracle.same(out, total)
        gathered = torch.empty(me.size * numel)
        assert await me.get(ac.all_gather(x, out=gathered)) is gathered
        oracle.same(gathered, torch.cat(others))
        assert await me.get(ac.reduce_scatter(x.repeat(me.size), out=out)) is out
        oracle.same(out, total)
        same = x.clone()
        assert await me.get(ac.broadcast(same, src=1, out=same)) is same
        oracle.same(same, others[1])
        works = [ac.all_reduce(x * turn, lane=f"hosts {turn % 2}") for turn in range(6)]
        for turn, work in enumerate(works):
            oracle.same(await me.get(work), total * turn)


def test_outputs_sizes_and_lanes(hosts: World) -> None:
    hosts.run(in_every_form, timeout=60)


async def said(me: Rank) -> None:
    x = torch.ones(1000)
    assert "through memory that the ranks of each share" in ac.explain("all_reduce", x).why[0]
    assert ac.explain("gather", x).why[0] == "gloo: these ranks are on 2 hosts"
    for name, given, call in (
        ("broadcast", "text", {}),
        ("broadcast", x, {"safe_mode": True}),
        ("all_gather", x, {"uneven": True}),
        ("all_reduce", 1, {}),
    ):
        told = ac.explain(name, given, **call)
        assert told.via != "nodes", f"{name} of messages: {told}"
        assert "gloo: these ranks are on 2 hosts" in told.why
    mine = [rank for rank, node in enumerate(current().nodes) if node == current().nodes[me.rank]]
    for ranks in (mine, [rank for rank in range(me.size) if rank not in mine]):
        group = ac.new_group(ranks)
        if me.rank in ranks:
            assert ac.explain("all_reduce", x, group=group).why[0] == "through memory that ranks share"
    told = ac.explain("all_reduce", x, group=[me.rank]).why[0]
    assert told == "gloo: a single rank has no other rank to share memory with"
    offline = explain_offline("all_reduce", backend="gloo", world_size=1)
    assert offline.why[0] == told


def test_it_is_explained(hosts: World) -> None:
    hosts.run(said)


async def bits(me: Rank) -> list[bytes]:
    generator = torch.Generator().manual_seed(me.rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in NUMELS:
            x = torch.randn(numel, generator=generator).to(dtype)
            found += [
                oracle.to_bytes(await me.get(ac.all_reduce(x, op=op))).tobytes() for op in ("sum", "avg")
            ]
    return found


def test_all_ranks_get_the_same_bits(hosts: World) -> None:
    """Each of the two hosts sums in rank order, and the two sums are added."""
    found = hosts.run(bits, timeout=60)
    assert all(one == found[0] for one in found)


async def in_rank_order(me: Rank) -> None:
    rows = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(me.size)]
    by_host: dict[int, torch.Tensor] = {}
    for rank, node in enumerate(current().nodes):
        by_host[node] = by_host[node] + rows[rank] if node in by_host else rows[rank]
    first, second = by_host.values()
    oracle.same(await me.get(ac.all_reduce(rows[me.rank])), first + second)
    got = await me.get(ac.reduce_scatter(rows[me.rank].repeat(me.size)))
    oracle.same(got, first + second)


def test_the_order_of_a_sum(hosts: World) -> None:
    hosts.run(in_rank_order)


async def refused(me: Rank) -> None:
    x = torch.full((70_001,), 2.0)
    for turn in range(2):
        if me.rank == 1:
            await me.refuses("culprit", (ValueError, TypeError), bad_avg)
        else:
            await me.refuses("peer", ac.PeerRefusedError, ac.all_reduce, x, says=("rank 1",))
        await me.check(f"afterwards {turn}", ac.all_reduce, x, expect=x * me.size)


def test_a_refused_call(hosts: World) -> None:
    """The lane continues in a new epoch, with its own memory."""
    hosts.run(refused, timeout=60)


async def unequal(me: Rank) -> None:
    x = torch.full((1000,), float(me.rank + 1))
    assert way("all_reduce", x) != "nodes"
    assert ac.explain("all_gather", x).why[0] == "gloo: these ranks are on 2 hosts"
    await me.check("sum", ac.all_reduce, x, expect=torch.full_like(x, 6.0))
    pair = ac.new_group([0, 1])
    if me.rank < 2:
        assert ac.explain("all_gather", x, group=pair).why[0] == "through memory that ranks share"
        oracle.same(await me.get(ac.all_reduce(x, group=pair)), torch.full_like(x, 3.0))


def test_unequal_hosts() -> None:
    """The world uses gloo; ranks of one host still share memory in groups of their own."""
    with worlds.fresh("memory", 3, nodes=(0, 0, 1)) as world:
        world.run(unequal)


async def checked(me: Rank) -> None:
    x = torch.ones(70_001)
    await me.check("alike", ac.all_reduce, x, expect=x * me.size)
    wrong = x[1:] if me.rank == 2 else x
    await me.refuses("shapes", ac.CollectiveMismatchError, ac.all_reduce, wrong, says=("rank 2",))
    await me.check("afterwards", ac.all_reduce, x, expect=x * me.size)


@pytest.mark.slow
def test_with_signatures_compared() -> None:
    with worlds.fresh("memory", 4, nodes=(0, 0, 1, 1), check="full") as world:
        world.run(checked)


async def one_dies(me: Rank) -> tuple[int, ...]:
    x = torch.ones(70_001)
    oracle.same(await me.get(ac.all_reduce(x)), x * me.size)
    if me.rank == 2:
        me.is_killed_once_all_wait()
    work = ac.all_reduce(x)
    me.show(f"{me.rank} waits")
    with raising(ac.PeerLostError) as caught:
        await me.get(work)
    me.show(f"{me.rank} heard")
    for rank in (0, 1, 3):
        me.see(f"{rank} heard")
    ac.finalize(abort=True)
    assert isinstance(caught.error, ac.PeerLostError)
    return tuple(caught.error.ranks)


def test_a_killed_rank_is_named() -> None:
    """Ranks on its host and on the other one name it."""
    with worlds.fresh("memory", 4, nodes=(0, 0, 1, 1)) as world:
        results = world.run(one_dies, dies=[2], timeout=30)
        world.kill()
    assert [results[rank] for rank in (0, 1, 3)] == [(2,)] * 3


@pytest.mark.parametrize(
    ("name", "numel", "by_host"),
    [
        ("all_reduce", 100, False),
        ("all_reduce", 1 << 10, True),
        ("broadcast", 1, True),
        ("all_gather", 1 << 10, False),
        ("all_gather", 1 << 14, True),
        ("reduce_scatter", 1 << 14, False),
        ("reduce_scatter", 1 << 16, True),
        ("gather", 1 << 20, False),
    ],
)
def test_from_a_size_that_pays(name: str, numel: int, by_host: bool) -> None:
    """The thresholds were measured; they apply if the ranks of each host share memory."""
    offline: dict[str, Any] = {"backend": "gloo", "world_size": 4, "nodes": 2, "shape": (numel,)}
    assert (explain_offline(name, memory=True, **offline).via == "nodes") == by_host
    assert explain_offline(name, memory=False, **offline).via != "nodes"

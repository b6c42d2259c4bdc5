"""An all_reduce that sums up each node first: when it is planned, and whether its results are right.

The nodes of these worlds come from the launcher's variables; all ranks are on this machine.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
import worlds
from asynccoll.backends.api.assembly import Member
from asynccoll.backends.api.rendezvous import nodes_of
from asynccoll.backends.choosing import capabilities_of
from asynccoll.ops.explaining import explain_offline
from asynccoll.plan import dispatch
from asynccoll.plan.spec import (
    Capabilities,
    Op,
    Plan,
    Policy,
    ReduceOp,
    TensorSpec,
    Topology,
    equal_nodes,
    place_of,
)
from asynccoll.runtime.process import current
from ranks import Rank, raising
from test_lanes import bad_avg, opposite
from worlds import World

GLOO = capabilities_of("gloo", "cpu")
#: Too many for an exchange, even of single bytes; not divisible by anything relevant.
NUMEL = 70_001
PAIRS = {"nodes": (0, 0, 1, 1), "by_node": True}


# --- which groups are nodes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_of", "nodes"),
    [
        ([0, 0, 1, 1], 2),
        ([5, 5, 5, 2, 2, 2], 2),
        ([0, 0, 1, 1, 2, 2, 3, 3], 4),
        ([0, 0, 0, 0], 1),
        ([0, 1, 2, 3], 1),  # nothing to sum up within them
        ([0, 0, 1], 1),
        ([0, 0, 1, 1, 1], 1),
        ([0, 1, 0, 1], 2),  # placed alternately
        ([0, 0, 1, 1, 0, 0], 1),
        ([0], 1),
        ([], 1),
    ],
)
def test_equal_nodes(node_of: list[int], nodes: int) -> None:
    """There are several nodes of equally many ranks, at least two; every rank has its own place."""
    assert equal_nodes(node_of) == nodes
    places = [place_of(index, node_of) for index in range(len(node_of))]
    assert len(set(places)) == len(node_of)
    assert all(
        (a[0] == b[0]) == (i == j)
        for a, i in zip(places, node_of, strict=True)
        for b, j in zip(places, node_of, strict=True)
    )


def test_a_node_is_one_by_name_and_by_the_launcher() -> None:
    """Hosts may all have the same name, and a launcher's blocks of ranks may be a guess."""
    assert nodes_of([Member("a"), Member("b"), Member("a")]) == (0, 1, 0)
    assert nodes_of([Member("a", 0), Member("a", 0), Member("a", 1)]) == (0, 0, 1)
    assert nodes_of([Member("a", 0), Member("b", 0), Member("a", 1), Member("b", 1)]) == (
        0,
        1,
        2,
        3,
    )


# --- the plan -----------------------------------------------------------------------------------


def plan(
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    ranks: int = 64,
    nodes: int = 8,
    known: Capabilities = GLOO,
    reduce: ReduceOp = ReduceOp.SUM,
    by_node: bool | None = None,
    op: Op = Op.ALL_REDUCE,
) -> Plan:
    spec = TensorSpec(dtype, (numel,))
    return dispatch.plan(op, spec, Topology(known, ranks, nodes), Policy(by_node=by_node), reduce)


def test_between_the_smallest_and_the_largest_nodes_come_first() -> None:
    """Small calls stay exchanged; where bandwidth counts, the ring sends less within a node."""
    assert plan(1 << 9).via == "all_to_all"
    assert plan(1 << 15).via == "nodes"
    assert plan(1 << 24).via == "native"
    assert plan(1 << 15, nodes=1).via == "native"
    assert plan(3).via == "native"  # fewer elements than ranks of a node
    assert plan(1 << 15, ranks=4, nodes=2).via == "native"  # too few hops are saved


@given(st.integers(2, 8), st.integers(2, 16), st.integers(1, 1 << 26))
def test_the_larger_the_world_the_more_hops_are_saved(nodes: int, each: int, numel: int) -> None:
    """Hops win until the bytes sent again within nodes cost more; one decision holds for a class of sizes."""
    ranks = nodes * each
    chosen = plan(numel, ranks=ranks, nodes=nodes).via == "nodes"
    size = 1 << int(math.log2(numel))
    assert chosen == (plan(size, ranks=ranks, nodes=nodes).via == "nodes")
    saved = 2 * (ranks - 1) - 2 * (each - 1) - 2 * (nodes - 1) - GLOO.steps_hops
    again = Fraction(2 * (each - 1), each) * 4 * size
    exchanged = 4 * size * (ranks - 1) <= GLOO.exchange_bytes
    assert chosen == (again <= saved * GLOO.hop_bytes and not exchanged and size >= ranks)


def test_the_user_may_choose() -> None:
    assert plan(1 << 24, by_node=True).via == "nodes"
    assert plan(1 << 15, ranks=4, nodes=2, by_node=True).via == "nodes"
    assert plan(1 << 15, by_node=False).via == "native"
    assert plan(1 << 15, nodes=1, by_node=True).via == "native"
    assert plan(1 << 9, by_node=True).via == "all_to_all"


def test_a_wish_is_yes_or_no() -> None:
    with pytest.raises(ac.InvalidArgumentError, match="by_node must be True"):
        ac.initialize("gloo", by_node="yes")
    assert not ac.is_initialized()


@pytest.mark.parametrize("backend", ["nccl", "mpi", "horovod", "serial", "xla-tpu"])
def test_libraries_that_choose_themselves_are_left_alone(backend: str) -> None:
    devices = {"nccl": "cuda", "xla-tpu": "xla"}
    assert capabilities_of(backend, devices.get(backend, "cpu")).hop_bytes == 0
    assert capabilities_of("nccl", "cpu") is GLOO  # which carries CPU tensors


def test_only_what_the_wire_reduces() -> None:
    """All other reductions are composed as before, and so are the other operations."""
    assert plan(1 << 15, torch.complex64).via == "nodes"
    assert plan(1 << 15, torch.complex64, reduce=ReduceOp.PRODUCT).via == "all_gather"
    assert plan(1 << 15, op=Op.REDUCE).via == "native"
    assert plan(1 << 15, op=Op.REDUCE_SCATTER).via == "all_to_all"
    sparse = dataclasses.replace(TensorSpec(torch.float32, (1 << 15,)), sparse=True)
    topology = Topology(GLOO, 64, 8)
    found = dispatch.plan(Op.ALL_REDUCE, sparse, topology, Policy(), ReduceOp.SUM)
    assert found.via == "all_gather"
    assert "sparse" in found.why[0]


def test_it_is_explained() -> None:
    for memory, how in ((False, "4 nodes of 4 ranks"), (True, "4 hosts of 4 ranks: through memory")):
        said = str(
            explain_offline(
                "all_reduce", backend="gloo", world_size=16, nodes=4, shape=(1 << 17,), memory=memory
            )
        )
        assert "all_reduce on gloo: all_reduce (composed by nodes)" in said
        assert how in said
    with pytest.raises(ac.InvalidArgumentError, match="16 ranks"):
        explain_offline("all_reduce", backend="gloo", world_size=16, nodes=3)


# --- two nodes of two ranks ---------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gloo", "memory"])
def nodes(request: pytest.FixtureRequest) -> World:
    """Two nodes of two ranks, where every all_reduce that is not exchanged goes by node."""
    return worlds.world(request.param, 4, **PAIRS)


def large(x: torch.Tensor, numel: int = NUMEL) -> torch.Tensor:
    """Repeat the elements of ``x`` up to ``numel``."""
    return x.repeat(numel // len(x) + 1)[:numel]


def via(x: torch.Tensor, **call: Any) -> str:
    return ac.explain("all_reduce", x, **call).via


async def reductions(me: Rank) -> None:
    assert (ac.get_nnodes(), ac.get_node_rank(), ac.get_local_rank()) == (2, me.rank // 2, me.rank % 2)
    for name, dtype in oracle.DTYPES.items():
        inputs = oracle.by_rank(oracle.counting, me.size, (1009,), dtype)
        x = large(inputs[me.rank])
        for op in oracle.reductions(dtype):
            with me.case(f"the plan for {op} of {name}"):
                natively = not (dtype.is_complex and op == "product")
                assert via(x, op=op) == ("nodes" if natively else "all_gather")
            await me.check(
                f"{op} of {name}",
                ac.all_reduce,
                x,
                op=op,
                expect=large(oracle.reduced(inputs, op)),
                value=True,
                rtol=oracle.epsilon(dtype) if op == "avg" else 0.0,
            )


def test_every_dtype_and_reduction(nodes: World) -> None:
    """Results equal NumPy's; the input is unchanged."""
    nodes.run(reductions)


async def sizes(me: Rank) -> None:
    for shape in [(), (0,), (1,), (5,), (40_003,), (3, 33_334), (1 << 17,), (800_001,)]:
        values = oracle.by_rank(oracle.counting, me.size, (7,), torch.float32)
        inputs = [large(x, math.prod(shape)).reshape(shape) for x in values]
        await me.check(f"{shape}", ac.all_reduce, inputs[me.rank], expect=oracle.reduced(inputs, "sum"))
    inputs = [large(x, 300 * 200).reshape(300, 200).t() for x in values]
    await me.check("transposed", ac.all_reduce, inputs[me.rank], expect=oracle.reduced(inputs, "sum"))
    mine = values[me.rank].repeat(10_000).requires_grad_()
    work = ac.all_reduce(mine, op="avg")
    (await me.get(work)).sum().backward()
    oracle.same(mine.grad, torch.ones_like(mine))


def test_every_size(nodes: World, runner: str) -> None:
    """Sizes are 0-d, empty, odd, in one piece, and large enough for a thread; one has a gradient."""
    nodes.run(sizes, runner=runner)


async def outputs(me: Rank) -> None:
    inputs = [large(x) for x in oracle.by_rank(oracle.counting, me.size, (1009,), torch.float32)]
    x, expected = inputs[me.rank], oracle.reduced(inputs, "sum")
    for _ in range(2):
        out = torch.full_like(x, 7.0)
        got = await me.get(ac.all_reduce(x, out=out))
        assert got is out
        oracle.same(out, expected)
    strided = torch.zeros(NUMEL, 2)[:, 0]
    oracle.same(await me.get(ac.all_reduce(x, out=strided)), expected)
    memory = torch.cat([x, torch.zeros(1)])
    assert await me.get(ac.all_reduce(memory[:-1], out=memory[1:])) is not None
    oracle.same(memory[1:], expected)
    oracle.same(x, inputs[me.rank])
    same = x.clone()
    assert await me.get(ac.all_reduce(same, out=same)) is same
    oracle.same(same, expected)


def test_out(nodes: World) -> None:
    """`out` is filled, also if it is transposed relative to the input, is strided, or is the input."""
    nodes.run(outputs)


async def real_values(me: Rank) -> list[bytes]:
    generator = torch.Generator().manual_seed(me.rank)
    bits = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for op in ("sum", "avg", "product"):
            x = torch.randn(NUMEL, generator=generator).to(dtype)
            got = await me.get(ac.all_reduce(x, op=op))
            bits.append(oracle.to_bytes(got).tobytes())
    return bits


def test_all_ranks_get_the_same_bits(nodes: World) -> None:
    """This holds however the result is rounded."""
    results = nodes.run(real_values)
    assert all(one == results[0] for one in results)


async def close_to_exact(me: Rank) -> None:
    rows = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(me.size)]
    exact = torch.stack(rows).double().sum(0)
    got = await me.get(ac.all_reduce(rows[me.rank]))
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    huge = torch.full((NUMEL,), 30_000.0, dtype=torch.float16)
    share = huge if me.rank == 0 else torch.zeros_like(huge)
    oracle.same(await me.get(ac.all_reduce(share, op="avg")), huge / 4)


def test_real_values(nodes: World) -> None:
    nodes.run(close_to_exact)


async def together(me: Rank) -> None:
    """Trees of many buckets, blocks, prepared operations and lanes each start their calls differently."""
    shapes = [(NUMEL,), (3,), (1 << 20,), (5, 7), (1 << 19,)]
    tree = {str(index): torch.full(shape, float(me.rank + 1)) for index, shape in enumerate(shapes)}
    got = await me.get(ac.all_reduce(tree))
    oracle.same(got, {name: torch.full_like(x, 10.0) for name, x in tree.items()})
    with ac.coalescing():
        works = [ac.all_reduce(x, op="avg") for x in tree.values()]
    for work, x in zip(works, tree.values(), strict=True):
        oracle.same(await me.get(work), torch.full_like(x, 2.5))
    x = torch.empty(NUMEL)
    prepared = ac.prepare("all_reduce", x, op="max")
    for turn in range(3):
        x.fill_(float(turn * 10 + me.rank))
        oracle.same(await me.get(prepared.start()), torch.full_like(x, turn * 10 + 3.0))
    many = [ac.all_reduce(torch.full((NUMEL + k,), float(k))) for k in range(6)]
    for k, work in enumerate(many):
        oracle.same(await me.get(work), torch.full((NUMEL + k,), 4.0 * k))


def test_trees_blocks_and_prepared_operations(nodes: World, runner: str) -> None:
    nodes.run(together, runner=runner)


async def lanes(me: Rank) -> None:
    assert via(torch.empty(NUMEL)) == "nodes"
    await opposite(me, NUMEL, turns=5)


def test_lanes_in_opposite_order(nodes: World, loop: str) -> None:
    """Each lane opens its own communicators within and across nodes, which meet by the lane's name."""
    nodes.run(lanes, runner=loop)


async def groups(me: Rank) -> list[int]:
    found = []
    for ranks in ([0, 1], [0, 2], [1, 2, 3], [0, 1, 2, 3]):
        group = ac.new_group(ranks)
        if me.rank in ranks:
            x = torch.full((NUMEL,), float(me.rank))
            oracle.same(await me.get(ac.all_reduce(x, group=group)), torch.full_like(x, float(sum(ranks))))
            found.append(current().groups[tuple(ranks)].nodes)
    return found


def test_groups(nodes: World) -> None:
    """Some groups are made of equal nodes, some are not; the sum is right in both cases."""
    assert nodes.run(groups) == [[1, 1, 2], [1, 1, 2], [1, 1, 2], [1, 2]]


async def refused(me: Rank) -> None:
    x = torch.full((NUMEL,), 2.0)
    for turn in range(2):
        if me.rank == 1:
            await me.refuses("culprit", (ValueError, TypeError), bad_avg)
        else:
            await me.refuses("peer", ac.PeerRefusedError, ac.all_reduce, x, says=("rank 1",))
        await me.check(f"afterwards {turn}", ac.all_reduce, x, expect=x * me.size)


def test_a_refused_call(nodes: World, runner: str) -> None:
    """The lane continues in a new epoch, with its own communicators."""
    nodes.run(refused, runner=runner)


async def late(me: Rank, lane: str) -> None:
    x = torch.ones(NUMEL)
    await me.get(ac.all_reduce(1, lane=lane))
    if me.rank == 3:
        for rank in range(3):
            me.see(f"{rank} timed out")
    work = ac.all_reduce(x, lane=lane, timeout=20.0 if me.rank == 3 else 0.2)
    if me.rank != 3:
        with raising(ac.CollectiveTimeoutError, "all_reduce"):
            await me.get(work)
        me.show(f"{me.rank} timed out")
    oracle.same(await me.get(ac.all_reduce(x, lane=lane)), x * me.size)
    if me.rank == 3:
        oracle.same(await me.get(work), x * me.size)


def test_a_rank_that_comes_late(nodes: World, runner: str) -> None:
    """Its peers time out, and later calls are right: the operation completed at its place in the order.

    The first time the communicators of the nodes are still to be opened, the second time they are open.
    """
    for _ in range(2):
        nodes.run(late, f"late {runner}", runner=runner)


async def checked(me: Rank) -> None:
    x = torch.ones(NUMEL)
    assert via(x) == "nodes"
    await me.check("alike", ac.all_reduce, x, expect=x * me.size)
    wrong = x[1:] if me.rank == 2 else x
    await me.refuses("shapes", ac.CollectiveMismatchError, ac.all_reduce, wrong, says=("rank 2",))
    await me.check("afterwards", ac.all_reduce, x, expect=x * me.size)


@pytest.mark.slow
def test_with_signatures_compared() -> None:
    """check="full" comes before the program; a mismatch is an error on all ranks, and nothing more."""
    with worlds.fresh("gloo", 4, check="full", **PAIRS) as world:
        world.run(checked)


# --- a rank that dies ---------------------------------------------------------------------------


async def one_dies(me: Rank, opened: bool) -> tuple[str, tuple[int, ...], float]:
    x = torch.ones(NUMEL)
    if opened:
        oracle.same(await me.get(ac.all_reduce(x)), x * me.size)
    if me.rank == 2:
        me.is_killed_once_all_wait()
    work = ac.all_reduce(x)
    me.show(f"{me.rank} waits")
    start = time.monotonic()
    try:
        await me.get(work)
    except ac.PeerLostError as error:
        seconds = time.monotonic() - start
        with raising(ac.PeerLostError):
            await me.get(ac.all_reduce(x))
        me.show(f"{me.rank} heard")
        for rank in (0, 1, 3):
            me.see(f"{rank} heard")
        ac.finalize(abort=True)
        return str(error), tuple(error.ranks), seconds
    raise AssertionError("gave a result without the dead rank")


@pytest.mark.parametrize("opened", [True, False])
def test_a_killed_rank_is_named(opened: bool) -> None:
    """Ranks of its node and of the other one name it, also while its communicators are being opened."""
    with worlds.fresh("gloo", 4, **PAIRS) as world:
        results = world.run(one_dies, opened, dies=[2], timeout=30)
        world.kill()
    assert results[2] == worlds.Died(-signal.SIGKILL)
    for rank in (0, 1, 3):
        text, lost, seconds = results[rank]
        assert lost == (2,), f"rank {rank} was told {lost}: {text}"
        assert seconds < 10, f"rank {rank} heard of it after {seconds} s"


# --- larger worlds ------------------------------------------------------------------------------


async def eight(me: Rank) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        inputs = oracle.by_rank(oracle.counting, me.size, (1009,), dtype)
        x = large(inputs[me.rank])
        for op in ("sum", "max"):
            assert via(x, op=op) == "nodes"
            await me.check(
                f"{op} of {dtype}", ac.all_reduce, x, op=op, expect=large(oracle.reduced(inputs, op))
            )
    ranks = [0, 1, 4, 5]  # on two of the nodes
    group = ac.new_group(ranks)
    if me.rank in ranks:
        x = torch.full((NUMEL,), float(me.rank))
        oracle.same(await me.get(ac.all_reduce(x, group=group)), torch.full_like(x, 10.0))


@pytest.mark.slow
def test_eight_ranks() -> None:
    """The ranks are on four nodes, placed alternately."""
    with worlds.fresh("gloo", 8, nodes=(0, 1, 2, 3, 0, 1, 2, 3), by_node=True) as world:
        world.run(eight, timeout=60)

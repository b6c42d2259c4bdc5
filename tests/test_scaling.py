"""Scaling factors, compression, sparse tensors, join and Adasum of all_reduce, the same on every backend."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import asynccoll as ac
import oracle
import worlds
from asynccoll.tensors.fusing import DIRECT_BYTES
from ranks import Rank, raising
from worlds import World


def halves(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that float16 holds exactly, as it does their sums and products with powers of two."""
    return (torch.arange(6).reshape(2, 3) * 0.5 + rank).to(dtype)


def total(size: int, *, before: float = 1.0, after: float = 1.0) -> list[list[float]]:
    """The scaled sum of ``halves``, in plain Python."""
    rows = [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]]
    return [[after * sum(before * (x + rank) for rank in range(size)) for x in row] for row in rows]


async def factors(me: Rank) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = halves(me.rank, dtype)
        for before, after in ((0.5, 1.0), (1.0, 4.0), (2, 0.25)):
            want = torch.tensor(total(me.size, before=before, after=after), dtype=torch.float64).to(dtype)
            label = f"{dtype} {before} {after}"
            await me.check(label, ac.all_reduce, x, prescale=before, postscale=after, expect=want)
    x, out = halves(me.rank), torch.empty(2, 3)
    got = await me.get(ac.all_reduce(x, prescale=0.5, out=out))
    assert got is out
    oracle.same(out, torch.tensor(total(me.size, before=0.5)))
    got = await me.get(ac.all_reduce(x, postscale=2.0, out=x))
    assert got is x
    oracle.same(x, torch.tensor(total(me.size, after=2.0)))
    most = max(range(me.size)) * 0.25 + 2.5 * 0.25
    got = await me.get(ac.all_reduce(halves(me.rank), op="max", prescale=0.25))
    assert got.max().item() == most
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        want = torch.tensor(total(me.size, before=0.5))
        await me.check("torch's", ac.all_reduce, halves(me.rank), op=op, expect=want)
        want = torch.tensor(total(me.size, before=1.0))
        await me.check("and ours", ac.all_reduce, halves(me.rank), op=op, prescale=2, expect=want)
    z = torch.tensor([1 + 2j, 3 - 1j]) * (me.rank + 1)
    n = me.size * (me.size + 1) / 2
    await me.check("complex", ac.all_reduce, z, prescale=2.0, expect=torch.tensor([2 + 4j, 6 - 2j]) * n)


def test_prescale_and_postscale(world: World, runner: str) -> None:
    """prescale and postscale multiply before and after the sum, for every floating dtype, with out= too."""
    world.run(factors, runner=runner)


async def compressed(me: Rank) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = halves(me.rank, dtype)
        want = torch.tensor(total(me.size), dtype=torch.float64).to(dtype)
        await me.check(f"{dtype}", ac.all_reduce, x, compression="fp16", expect=want)
    # Bits that float16 cannot hold are lost on the wire, which shows that float16 was really sent.
    x = torch.tensor([1.0 + 2**-20])
    await me.check("rounded", ac.all_reduce, x, compression="fp16", expect=torch.tensor([float(me.size)]))
    plan = ac.explain("all_reduce", torch.ones(2), compression="fp16")
    assert plan == ac.explain("all_reduce", torch.ones(2, dtype=torch.float16))
    scaled: dict[str, Any] = {"prescale": 2.0**-10, "postscale": 2.0**10, "compression": "fp16"}
    large = torch.tensor([65536.0])
    await me.check("in range", ac.all_reduce, large, **scaled, expect=large * me.size)


def test_compression(world: World, runner: str) -> None:
    """compression="fp16" sends float16, and the result has the dtype of the input."""
    world.run(compressed, runner=runner)


@dataclass
class Layer:
    """A node of a tree."""

    weight: torch.Tensor
    bias: torch.Tensor


async def trees(me: Rank) -> None:
    tree = {"a": Layer(halves(me.rank), halves(me.rank, torch.float64)), "b": [halves(me.rank)]}
    got = await me.get(ac.all_reduce(tree, prescale=0.5, postscale=2.0, compression="fp16"))
    want = total(me.size)
    for x, dtype in (
        (got["a"].weight, torch.float32),
        (got["a"].bias, torch.float64),
        (got["b"][0], torch.float32),
    ):
        oracle.same(x, torch.tensor(want, dtype=dtype))
    x = halves(me.rank).requires_grad_()
    scaled = await me.get(ac.all_reduce(x, op="sum", prescale=0.5, postscale=8.0))
    scaled.sum().backward()
    oracle.same(x.grad, torch.full((2, 3), 4.0 * me.size))


def test_trees_and_gradients(world: World, runner: str) -> None:
    """Every tensor of a tree is scaled, and the gradient includes the factors."""
    world.run(trees, runner=runner)


async def refused(me: Rank) -> None:
    x = torch.ones(2)
    call = ac.all_reduce
    await me.refuses(
        "integers", TypeError, call, torch.ones(2, dtype=torch.int64), prescale=0.5, says=("int64",)
    )
    narrow = torch.ones(2, dtype=torch.float8_e4m3fn)
    says = ("float8_e4m3fn", "float32 first")
    await me.refuses("float8", ac.UnsupportedOpError, call, narrow, postscale=2.0, says=says)
    await me.refuses("number", TypeError, call, 1.0, postscale=2.0, says=("float",))
    await me.refuses("in a tree", TypeError, call, [x, 1], compression="fp16", says=("int",))
    await me.refuses("name", ValueError, call, x, compression="fp8", says=("'fp8'", "'fp16'"))
    await me.refuses("factor", TypeError, call, x, prescale="2", says=("prescale", "'2'"))
    # Adasum is for floating-point tensors, and for Horovod on hardware that supports it.
    await me.refuses("adasum", ac.UnsupportedOpError, call, x, op="adasum", says=("adasum", "horovod"))
    integers = torch.ones(2, dtype=torch.int32)
    await me.refuses("adasum of integers", TypeError, call, integers, op="adasum", says=("int32",))
    await me.refuses("adasum of a number", TypeError, call, 1.5, op="adasum", says=("adasum",))
    await me.check("afterwards", call, 1, expect=me.size)


def test_what_cannot_be_scaled_is_refused(world: World) -> None:
    """The call is refused before anything is sent, so that the next call works."""
    world.run(refused)


async def sparse(me: Rank) -> None:
    size = me.size
    mine = torch.sparse_coo_tensor(
        [[0, me.rank + 1]], [1.0, 2.0 * me.rank], (size + 2,), check_invariants=True
    )
    before = mine.to_dense().clone()
    got = await me.get(ac.all_reduce(mine))
    want_of_all = [float(size), *(2.0 * rank for rank in range(size)), 0.0]
    assert got.is_sparse
    oracle.same(got.to_dense(), torch.tensor(want_of_all))
    oracle.same(mine.to_dense(), before)
    rows = torch.sparse_coo_tensor([[me.rank]], [[1.0, 2.0]], (size, 2), check_invariants=True)
    got = await me.get(ac.all_reduce(rows))
    oracle.same(got.to_dense(), torch.tensor([[1.0, 2.0]] * size))
    for dtype in (torch.float16, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        values = [torch.tensor([1, rank], dtype=dtype) for rank in range(size)]
        rows = torch.sparse_coo_tensor(
            [[0, me.rank + 1]], values[me.rank], (size + 1,), check_invariants=True
        )
        with me.case(f"{dtype}"):
            got = await me.get(ac.all_reduce(rows))
            want = [size, *range(size)]
            oracle.same(got.to_dense(), torch.tensor(want, dtype=dtype))
    for factors in {"prescale": 0.5}, {"postscale": 0.5}, {"prescale": 0.5, "compression": "fp16"}:
        got = await me.get(ac.all_reduce(mine, **factors))
        oracle.same(got.to_dense(), torch.tensor(want_of_all) * 0.5)
    if me.size > 1:  # of one shape, but sparse by row on rank 0 and by element on the others
        shape = (me.size, 2)
        rows = torch.eye(*shape).to_sparse(1 if me.rank == 0 else 2)
        with raising(ac.CollectiveMismatchError, "sparse_dim=1", "sparse_dim=2"):
            await me.get(ac.all_reduce(rows))
        await me.check("afterwards", ac.all_reduce, 1, expect=me.size)
    none = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0), (3,), check_invariants=True)
    oracle.same((await me.get(ac.all_reduce(none))).to_dense(), torch.zeros(3))


def test_sparse_sums(world: World, runner: str) -> None:
    """Indices and their number may differ between ranks; rows of values and empty tensors are summed too."""
    if world.backend != "xla-tpu":  # xla-tpu refuses them: test_errors
        world.run(sparse, runner=runner)


async def sparse_beside_large(me: Rank) -> None:
    """A sparse leaf in a tree that is too large for its caller to pack."""
    size = me.size
    rows = torch.sparse_coo_tensor([[me.rank]], [[1.0, 2.0]], (size, 2), check_invariants=True)
    numel = DIRECT_BYTES // 4 + 1
    tree = {
        "bias": torch.full((3,), me.rank + 1),
        "rows": rows,
        "weight": torch.full((numel,), me.rank + 1.0),
    }
    assert "bucket" in str(ac.explain("all_reduce", tree))
    got = await me.get(ac.all_reduce(tree))
    oracle.same(got["rows"].to_dense(), torch.tensor([[1.0, 2.0]] * size))
    oracle.same(got["bias"], torch.full((3,), sum(range(size + 1))))
    oracle.same(got["weight"], torch.full((numel,), float(sum(range(size + 1)))))


def test_sparse_leaves_of_large_trees(several: World) -> None:
    """The size of sparse leaves differs between ranks, so the choice of buckets does not depend on it."""
    if several.backend != "xla-tpu":
        several.run(sparse_beside_large)


async def uneven(me: Rank) -> None:
    if me.backend != "horovod" and me.size > 1:
        await me.refuses("join", ac.UnsupportedOpError, ac.join, says=("horovod", "min"))
        return
    for _ in range(2):
        for step in range(2 + me.rank):
            x = torch.full((2,), float(me.rank + 1), requires_grad=True)
            y = await me.get(ac.all_reduce(x))
            present = [rank for rank in range(me.size) if step < 2 + rank]
            oracle.same(y.detach(), torch.full((2,), float(sum(rank + 1 for rank in present))))
            y.sum().backward()
            oracle.same(x.grad, torch.full((2,), float(len(present))))
        assert await me.get(ac.join()) == me.size - 1
        await me.check("together again", ac.all_gather, me.rank, expect=list(range(me.size)))


def test_join_for_uneven_inputs(world: World, runner: str) -> None:
    """A rank that has no more data takes part with zeros. After the join, all ranks continue together."""
    with unrefused(world) as one:
        one.run(uneven, runner=runner)


@contextlib.contextmanager
def unrefused(world: World) -> Iterator[World]:
    """A world in which no call has been refused yet, if that matters to ``join`` on this backend."""
    if world.backend != "horovod":
        yield world
        return
    with worlds.fresh(world.backend, world.size) as one:
        yield one


def run_where_ranks_join(world: World, case: Callable[[Rank], Awaitable[None]]) -> None:
    """Run ``case`` on Horovod only; elsewhere ``join`` is refused (``uneven`` tests that)."""
    if world.backend == "horovod":
        with unrefused(world) as one:
            one.run(case)


async def in_flight(me: Rank) -> None:
    for turn in range(3):
        steps = [2 + 3 * (rank == turn % me.size) for rank in range(me.size)]
        works = [
            ac.all_reduce(torch.full((3,), me.rank + 1.0), lane=lane)
            for _ in range(steps[me.rank])
            for lane in (None, f"late {turn}")
        ]
        joined = ac.join()
        for number, work in enumerate(works):
            present = [rank for rank in range(me.size) if number // 2 < steps[rank]]
            oracle.same(await me.get(work), torch.full((3,), float(sum(rank + 1 for rank in present))))
        await me.get(joined)
        await me.check("together again", ac.all_reduce, 1, lane=f"late {turn}", expect=me.size)


def test_join_with_calls_in_flight(pair: World) -> None:
    """Horovod would count the joined rank twice in these calls and leave out the others' numbers."""
    run_where_ranks_join(pair, in_flight)


async def on_a_lane_of_some(me: Rank) -> None:
    if me.rank == 1:
        total = await me.get(ac.all_reduce(torch.ones(2), lane="late"))
        oracle.same(total, torch.ones(2))
    await me.get(ac.join())
    await me.check("numbers", ac.all_reduce, 1, lane="late", expect=me.size)
    if me.rank == 0:
        with raising(ac.InvalidArgumentError):
            await me.get(ac.all_reduce(torch.ones(2), op="nothing of the kind", lane="late"))
    else:
        with raising(ac.PeerRefusedError, "rank 0 refused its side of all_reduce #2 after 1 join"):
            await me.get(ac.all_reduce(torch.ones(2), lane="late"))


def test_a_lane_that_only_some_had_before_a_join(pair: World) -> None:
    """After the join, all ranks number the calls of the lane alike."""
    run_where_ranks_join(pair, on_a_lane_of_some)


async def joined_after_a_refusal(me: Rank) -> None:
    if me.rank == 0:
        with raising(ac.InvalidArgumentError):
            await me.get(ac.all_reduce(torch.ones(2), op="nothing of the kind"))
    else:
        with raising(ac.PeerRefusedError):
            await me.get(ac.all_reduce(torch.ones(2)))
    await me.check("in step", ac.all_gather, me.rank, expect=list(range(me.size)))
    refused = (ac.UnsupportedOpError, ac.PeerRefusedError)  # refused by this rank, or by the peer before it
    for _ in range(2):
        await me.refuses("join", refused, ac.join, says=("a call that a rank has refused", "op='min'"))
        await me.check("still", ac.all_reduce, me.rank, expect=sum(range(me.size)))


def test_no_join_after_a_refused_call(pair: World) -> None:
    """After a refused call, Horovod would look for tensors of that call on peers that never issued it."""
    run_where_ranks_join(pair, joined_after_a_refusal)

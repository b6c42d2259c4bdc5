"""all_gather: every rank gets all ranks' values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
import payloads
from asynccoll.testing import simulate
from ranks import Rank
from worlds import World


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for shape in [(), (0,), (1,), (3, 2), (4, 0, 2), (1025,)]:
            inputs = oracle.by_rank(oracle.moving, me.size, shape, dtype)
            await me.check(
                f"{name} {shape}",
                ac.all_gather,
                inputs[me.rank],
                expect=oracle.concatenated(inputs),
            )


def test_every_dtype_and_shape(world: World, runner: str) -> None:
    """Tensors are concatenated along dim 0 bit for bit; 0-d tensors become a vector with one per rank."""
    world.run(dtypes, runner=runner)


async def dims(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        inputs = oracle.by_rank(oracle.moving, me.size, (2, 3, 4), dtype)
        for dim in range(-3, 3):
            await me.check(
                f"dim {dim} {dtype}",
                ac.all_gather,
                inputs[me.rank],
                dim=dim,
                expect=oracle.concatenated(inputs, dim),
            )
        for name, layout in oracle.LAYOUTS.items():
            rows = [layout(oracle.moving(r, (4, 3), dtype)) for r in range(me.size)]
            for dim in (0, 1):
                await me.check(
                    f"{name} dim {dim} {dtype}",
                    ac.all_gather,
                    rows[me.rank],
                    dim=dim,
                    expect=oracle.concatenated(rows, dim),
                )


def test_every_dim_and_layout(world: World, runner: str) -> None:
    """Tensors are concatenated along the given dimension; a negative one counts from the end."""
    world.run(dims, runner=runner)


async def values(me: Rank) -> None:
    for name, make in payloads.MOVABLE.items():
        inputs = payloads.of_all(make, me.size)
        await me.check(name, ac.all_gather, inputs[me.rank], expect=inputs)


def test_numbers_and_text(world: World, runner: str) -> None:
    """Numbers and texts are returned as a list of all ranks' values, with their type and any length."""
    world.run(values, runner=runner)


async def trees(me: Rank) -> None:
    for name, make in {**payloads.TREES, **payloads.TEXT_TREES}.items():
        inputs = payloads.of_all(make, me.size)
        await me.check(
            name,
            ac.all_gather,
            inputs[me.rank],
            expect=oracle.tree_map(oracle.gathered_leaf, inputs),
        )


def test_trees_are_gathered_leaf_by_leaf(world: World, runner: str) -> None:
    """The same tree is returned: its tensor leaves are concatenated, its other leaves become lists."""
    world.run(trees, runner=runner)


UNEVEN = {
    "growing": [(0, 2), (1, 2), (2, 2), (3, 2)],
    "one has nothing": [(3,), (0,), (2,), (5,)],
    "one has much": [(1,), (40_000,), (2,), (3,)],
    "other dims too": [(2, 3), (4, 1), (0, 7), (5, 5)],
    "equal": [(2, 2)] * 4,
}


async def uneven(me: Rank) -> None:
    for name, shapes in UNEVEN.items():
        for dtype in (torch.float32, torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64):
            inputs = [oracle.moving(rank, shapes[rank], dtype) for rank in range(me.size)]
            await me.check(f"{name} {dtype}", ac.all_gather, inputs[me.rank], uneven=True, expect=inputs)
    dtypes = [(torch.float32, torch.int64, torch.bool)[rank % 3] for rank in range(me.size)]
    mixed = [oracle.moving(rank, (rank, 2), dtype) for rank, dtype in enumerate(dtypes)]
    await me.check("dtypes", ac.all_gather, mixed[me.rank], uneven=True, expect=mixed)
    tree = {"x": mixed[me.rank], "n": me.rank}
    whole = {"x": mixed, "n": list(range(me.size))}
    await me.check("dtypes of leaves", ac.all_gather, tree, uneven=True, expect=whole)


def test_uneven_gives_the_list_of_all(world: World, runner: str) -> None:
    """Ranks need not know each other's shapes: each rank's tensor is returned as it was."""
    world.run(uneven, runner=runner)


async def into_out(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        for dim in (0, 1):
            inputs = oracle.by_rank(oracle.moving, me.size, (2, 3), dtype)
            expect = oracle.concatenated(inputs, dim)
            with me.case(f"{dtype} dim {dim}"):
                out = torch.zeros(expect.shape, dtype=dtype)
                got = await me.get(ac.all_gather(inputs[me.rank], dim=dim, out=out))
                assert got is out, "the result is not out"
                oracle.same(out, expect)
    with me.case("own place in out"):
        whole = torch.zeros(me.size * 2)
        mine = whole[2 * me.rank : 2 * me.rank + 2]
        inputs = oracle.by_rank(oracle.counting, me.size, (2,), torch.float32)
        mine.copy_(inputs[me.rank])
        await me.get(ac.all_gather(mine, out=whole))
        oracle.same(whole, oracle.concatenated(inputs))
    each = 400_000
    for offset in (0, 7, -7, each // 3):
        with me.case(f"{offset} behind the own place in out"):
            memory = torch.zeros((me.size + 2) * each)
            inputs = [torch.arange(float(each)) + rank for rank in range(me.size)]
            start = (me.rank + 1) * each + offset
            mine = memory[start : start + each]
            mine.copy_(inputs[me.rank])
            await me.get(ac.all_gather(mine, out=memory[each:-each]))
            oracle.same(memory[each:-each], oracle.concatenated(inputs))


def test_out_is_filled_and_returned(world: World, runner: str) -> None:
    """`out` is the result; the input may be the rank's own slice of it."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    x = torch.ones(2, 3)
    await me.refuses("dim", ValueError, ac.all_gather, x, dim=2, says=("dim", "2"))
    await me.refuses("dim of 0-d", ValueError, ac.all_gather, torch.ones(()), dim=1, says=("dim",))
    await me.refuses("type", TypeError, ac.all_gather, object(), says=("object",))
    await me.refuses("out", (ValueError, TypeError), ac.all_gather, x, out=x[:, :0], says=("out",))
    await me.check("afterwards", ac.all_gather, me.rank, expect=list(range(me.size)))


def test_bad_calls_are_refused(world: World) -> None:
    """A dim out of range, an unsupported payload and a wrong out are refused; the lane still works."""
    world.run(refused)


async def one_example(me: Rank, shape: tuple[int, ...], dim: int, name: str) -> None:
    inputs = oracle.by_rank(oracle.moving, me.size, shape, oracle.DTYPES[name])
    await me.check(
        f"{name} {shape} dim {dim}",
        ac.all_gather,
        inputs[me.rank],
        dim=dim,
        expect=oracle.concatenated(inputs, dim),
    )


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    dim=st.integers(-4, 3),
    name=st.sampled_from(sorted(oracle.DTYPES)),
)
def test_any_shape_and_dim(world: World, shape: tuple[int, ...], dim: int, name: str) -> None:
    """For any shape and dimension the result agrees with NumPy's concatenate."""
    dim = max(-len(shape), min(dim, len(shape) - 1))
    world.run(one_example, shape, dim, name)


async def one_uneven(me: Rank, lengths: list[int], tail: tuple[int, ...], name: str) -> None:
    dtype = oracle.DTYPES[name]
    inputs = [oracle.moving(rank, (lengths[rank], *tail), dtype) for rank in range(me.size)]
    await me.check(f"{name} {lengths} {tail}", ac.all_gather, inputs[me.rank], uneven=True, expect=inputs)


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    tail=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    name=st.sampled_from(sorted(oracle.DTYPES)),
)
def test_any_uneven_lengths(world: World, lengths: list[int], tail: tuple[int, ...], name: str) -> None:
    """For any lengths of the ranks' tensors, every rank gets every tensor."""
    world.run(one_uneven, lengths, tail, name)


def test_gathered_tensors_know_nothing_of_each_other() -> None:
    """They share memory, but to change one in place does not affect the gradients of another."""

    async def main() -> None:
        first, second = await ac.all_gather(torch.ones(200), uneven=True)
        squares = (second * torch.ones(200, requires_grad=True)).square().sum()
        first.add_(1)
        squares.backward()

    simulate(main, world_size=2, transport="memory").check()

"""gather: `dst` gets all ranks' values, the others get None."""

from __future__ import annotations

import torch

import asynccoll as ac
import oracle
import payloads
from ranks import Rank
from worlds import World


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for turn, shape in enumerate([(), (0,), (1,), (3, 2), (4, 0, 2), (1025,)]):
            dst = turn % me.size
            inputs = oracle.by_rank(oracle.moving, me.size, shape, dtype)
            await me.check(
                f"{name} {shape} to {dst}",
                ac.gather,
                inputs[me.rank],
                dst=dst,
                expect=oracle.gather(inputs, dst)[me.rank],
            )


def test_every_dtype_and_shape(world: World, runner: str) -> None:
    """dst gets all tensors bit for bit, the others get None."""
    world.run(dtypes, runner=runner)


async def dims(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16):
        inputs = oracle.by_rank(oracle.moving, me.size, (2, 3, 4), dtype)
        for dim in range(-3, 3):
            await me.check(
                f"dim {dim} {dtype}",
                ac.gather,
                inputs[me.rank],
                dim=dim,
                expect=oracle.gather(inputs, 0, dim)[me.rank],
            )
        for name, layout in oracle.LAYOUTS.items():
            rows = [layout(oracle.moving(r, (4, 3), dtype)) for r in range(me.size)]
            await me.check(
                f"{name} {dtype}",
                ac.gather,
                rows[me.rank],
                dim=1,
                expect=oracle.gather(rows, 0, 1)[me.rank],
            )


def test_every_dim_and_layout(world: World, runner: str) -> None:
    """Tensors are concatenated along the given dimension; dst is rank 0 by default."""
    world.run(dims, runner=runner)


async def values(me: Rank) -> None:
    for dst in range(me.size):
        for name, make in payloads.MOVABLE.items():
            inputs = payloads.of_all(make, me.size)
            expect = inputs if me.rank == dst else None
            await me.check(f"{name} to {dst}", ac.gather, inputs[me.rank], dst=dst, expect=expect)


def test_numbers_and_text(world: World, runner: str) -> None:
    """dst gets the list of all values, the others get None."""
    world.run(values, runner=runner)


async def trees(me: Rank) -> None:
    for name, make in {**payloads.TREES, **payloads.TEXT_TREES}.items():
        inputs = payloads.of_all(make, me.size)
        whole = oracle.tree_map(oracle.gathered_leaf, inputs)
        dst = me.size - 1
        await me.check(name, ac.gather, inputs[me.rank], dst=dst, expect=whole if me.rank == dst else None)


def test_trees(world: World, runner: str) -> None:
    """dst gets the tree with every leaf gathered, the others get None."""
    world.run(trees, runner=runner)


async def uneven(me: Rank) -> None:
    dst = me.size - 1
    for name, dtype in oracle.DTYPES.items():
        inputs = [oracle.moving(rank, (rank, 2) if rank % 2 else (3,), dtype) for rank in range(me.size)]
        expect = inputs if me.rank == dst else None
        await me.check(name, ac.gather, inputs[me.rank], dst=dst, uneven=True, expect=expect)
    long = [torch.arange(1000.0 * (rank + 1)) for rank in range(me.size)]
    tree = {"x": long[me.rank], "n": me.rank}
    whole = {"x": long, "n": list(range(me.size))} if me.rank == 0 else None
    await me.check("tree", ac.gather, tree, uneven=True, expect=whole)
    out = torch.zeros(1)
    await me.refuses("out", ac.InvalidArgumentError, ac.gather, long[me.rank], uneven=True, out=out)


def test_uneven_gives_the_list_of_all(world: World, runner: str) -> None:
    """dst need not know shapes and dtypes, and gets the tensors as a list."""
    world.run(uneven, runner=runner)


async def into_out(me: Rank) -> None:
    inputs = oracle.by_rank(oracle.moving, me.size, (2, 3), torch.int16)
    for dst in range(me.size):
        with me.case(f"to {dst}"):
            out = torch.zeros(2 * me.size, 3, dtype=torch.int16) if me.rank == dst else None
            got = await me.get(ac.gather(inputs[me.rank], dst=dst, out=out))
            assert got is out, "the result is not out"
            if out is not None:
                oracle.same(out, oracle.concatenated(inputs))


def test_out_is_filled_on_dst(world: World, runner: str) -> None:
    """`out` is given only on dst, and is the result there."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    x = torch.ones(2, 3)
    await me.refuses("dst", ValueError, ac.gather, x, dst=me.size, says=(str(me.size),))
    await me.refuses("dim", ValueError, ac.gather, x, dim=-3, says=("dim", "-3"))
    await me.refuses("type", TypeError, ac.gather, object(), says=("object",))
    expect = list(range(me.size)) if me.rank == 0 else None
    await me.check("afterwards", ac.gather, me.rank, expect=expect)


def test_bad_calls_are_refused(world: World) -> None:
    """A rank or dim out of range and an unsupported payload are refused; the lane still works."""
    world.run(refused)

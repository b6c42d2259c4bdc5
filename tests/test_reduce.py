"""reduce: `dst` gets the reduction, the other ranks None."""

from __future__ import annotations

import torch

import asynccoll as ac
import oracle
import payloads
from asynccoll.testing import simulate
from ranks import Rank
from worlds import World

MEANINGLESS = (ValueError, TypeError)


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        inputs = oracle.by_rank(oracle.counting, me.size, (2, 3), dtype)
        for turn, op in enumerate(oracle.reductions(dtype)):
            dst = turn % me.size
            await me.check(
                f"{op} of {name} to {dst}",
                ac.reduce,
                inputs[me.rank],
                dst=dst,
                op=op,
                expect=oracle.reduce(inputs, op, dst)[me.rank],
                value=True,
                rtol=oracle.epsilon(dtype) if op == "avg" else 0.0,
            )
        for op in oracle.refusals(dtype):
            await me.refuses(f"{op} of {name}", MEANINGLESS, ac.reduce, inputs[me.rank], op=op, says=(op,))


def test_every_dtype_and_reduction(world: World, runner: str) -> None:
    """dst gets NumPy's result, the others None; undefined reductions are refused."""
    world.run(dtypes, runner=runner)


async def shapes(me: Rank) -> None:
    for shape in ((), (0,), (3, 0), (1,), (4, 5, 2), (50_001,)):
        inputs = oracle.by_rank(oracle.counting, me.size, shape, torch.float32)
        await me.check(
            f"{shape}",
            ac.reduce,
            inputs[me.rank],
            expect=oracle.reduce(inputs, "sum", 0)[me.rank],
            value=True,
        )
    for name, layout in oracle.LAYOUTS.items():
        inputs = [layout(oracle.counting(r, (4, 3), torch.int16)) for r in range(me.size)]
        last = me.size - 1
        await me.check(
            name,
            ac.reduce,
            inputs[me.rank],
            dst=last,
            expect=oracle.reduce(inputs, "sum", last)[me.rank],
        )


def test_every_shape_and_layout(world: World, runner: str) -> None:
    """By default dst is rank 0 and op is sum; no rank's input is changed."""
    world.run(shapes, runner=runner)


async def numbers_and_trees(me: Rank) -> None:
    for dst in range(me.size):
        values = [2**62 + rank for rank in range(me.size)]
        expect = sum(values) if me.rank == dst else None
        await me.check(f"ints to {dst}", ac.reduce, values[me.rank], dst=dst, expect=expect)
        expect = me.size * 0.5 if me.rank == dst else None
        await me.check(f"floats to {dst}", ac.reduce, 0.5, dst=dst, expect=expect)
        for name, make in payloads.TREES.items():
            inputs = payloads.of_all(make, me.size)
            whole = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "sum"), inputs)
            await me.check(
                f"{name} to {dst}",
                ac.reduce,
                inputs[me.rank],
                dst=dst,
                expect=whole if me.rank == dst else None,
                value=True,
            )


def test_numbers_and_trees(world: World, runner: str) -> None:
    """On dst, numbers keep their type and trees their shape; the others get None."""
    world.run(numbers_and_trees, runner=runner)


async def into_out(me: Rank) -> None:
    inputs = oracle.by_rank(oracle.counting, me.size, (4,), torch.float32)
    for dst in range(me.size):
        with me.case(f"separate, to {dst}"):
            out = torch.zeros(4)
            got = await me.get(ac.reduce(inputs[me.rank], dst=dst, out=out))
            assert (got is out) if me.rank == dst else (got is None), f"returned {got!r}"
            if me.rank == dst:
                oracle.same(out, oracle.reduced(inputs, "sum"), value=True)
        with me.case(f"alias, to {dst}"):
            x = inputs[me.rank].clone()
            await me.get(ac.reduce(x, dst=dst, out=x))
            if me.rank == dst:
                oracle.same(x, oracle.reduced(inputs, "sum"), value=True)


def test_out_is_filled_on_dst(world: World, runner: str) -> None:
    """`out` on dst is the result, and may be the input."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    await me.refuses("text", MEANINGLESS, ac.reduce, "text")
    await me.refuses("dst too big", ValueError, ac.reduce, 1, dst=me.size, says=(str(me.size),))
    await me.refuses("dst negative", ValueError, ac.reduce, 1, dst=-1, says=("-1",))
    await me.check("afterwards", ac.reduce, 1, expect=me.size if me.rank == 0 else None)


def test_bad_calls_are_refused(world: World) -> None:
    """Text and missing ranks are refused; the lane keeps working."""
    world.run(refused)


class Numbers(dict[str, object]):
    """Refuses None, as a class may."""

    def __setitem__(self, key: str, value: object) -> None:
        assert value is not None
        super().__setitem__(key, value)


def test_only_dst_makes_a_tree_of_results() -> None:
    """Elsewhere it would be one of None."""

    async def main(rank: int) -> None:
        tree = Numbers(n=rank, x=torch.ones(2))
        total, every = await ac.reduce(tree, dst=0), await ac.gather(tree, dst=1)
        assert total is None if rank else total["n"] == 1 and total["x"].tolist() == [2.0, 2.0]
        assert every["x"].tolist() == [1.0] * 4 if rank else every is None

    simulate(main, world_size=2).check()

"""reduce_scatter: rank r gets the r-th part of the reduction."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
from ranks import Rank
from worlds import World

MEANINGLESS = (ValueError, TypeError)


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        inputs = oracle.by_rank(oracle.counting, me.size, (2 * me.size, 3), dtype)
        for op in oracle.reductions(dtype):
            await me.check(
                f"{op} of {name}",
                ac.reduce_scatter,
                inputs[me.rank],
                op=op,
                expect=oracle.reduce_scatter(inputs, op)[me.rank],
                value=True,
                rtol=oracle.epsilon(dtype) if op == "avg" else 0.0,
            )
        for op in oracle.refusals(dtype):
            await me.refuses(
                f"{op} of {name}",
                MEANINGLESS,
                ac.reduce_scatter,
                inputs[me.rank],
                op=op,
                says=(op,),
            )


def test_every_dtype_and_reduction(world: World, runner: str) -> None:
    """Each rank gets its part of NumPy's result; undefined reductions are refused."""
    world.run(dtypes, runner=runner)


async def dims(me: Rank) -> None:
    shape = (me.size, 2 * me.size, 3 * me.size)
    for dtype in (torch.float32, torch.int16):
        inputs = oracle.by_rank(oracle.counting, me.size, shape, dtype)
        for dim in range(-3, 3):
            await me.check(
                f"dim {dim} {dtype}",
                ac.reduce_scatter,
                inputs[me.rank],
                dim=dim,
                expect=oracle.reduce_scatter(inputs, "sum", dim)[me.rank],
                value=True,
            )
    for shape in ((0,), (me.size, 0), (me.size,), (me.size * 10_001,)):
        inputs = oracle.by_rank(oracle.counting, me.size, shape, torch.float32)
        await me.check(
            f"{shape}",
            ac.reduce_scatter,
            inputs[me.rank],
            expect=oracle.reduce_scatter(inputs, "sum")[me.rank],
            value=True,
        )


def test_every_dim_and_shape(world: World, runner: str) -> None:
    """The result is cut along the given dimension, also a negative one; the default op is sum."""
    world.run(dims, runner=runner)


async def layouts(me: Rank) -> None:
    shape = (me.size, 2 * me.size)
    for name, layout in oracle.LAYOUTS.items():
        for dim in (0, 1):
            inputs = [layout(oracle.counting(r, shape, torch.float32)) for r in range(me.size)]
            await me.check(
                f"{name} dim {dim}",
                ac.reduce_scatter,
                inputs[me.rank],
                dim=dim,
                expect=oracle.reduce_scatter(inputs, "sum", dim)[me.rank],
                value=True,
            )


def test_every_layout(world: World, runner: str) -> None:
    """Non-contiguous inputs give the same results."""
    world.run(layouts, runner=runner)


async def into_out(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        for dim in (0, 1):
            inputs = oracle.by_rank(oracle.counting, me.size, (me.size, me.size), dtype)
            expect = oracle.reduce_scatter(inputs, "sum", dim)[me.rank]
            with me.case(f"{dtype} dim {dim}"):
                out = torch.zeros(expect.shape, dtype=dtype)
                got = await me.get(ac.reduce_scatter(inputs[me.rank], dim=dim, out=out))
                assert got is out, "the result is not out"
                oracle.same(out, expect, value=True)
    with me.case("own place in the input"):
        inputs = oracle.by_rank(oracle.counting, me.size, (2 * me.size,), torch.float32)
        x = inputs[me.rank].clone()
        mine = x[2 * me.rank : 2 * me.rank + 2]
        await me.get(ac.reduce_scatter(x, out=mine))
        oracle.same(mine, oracle.reduce_scatter(inputs, "sum")[me.rank], value=True)
    each = 400_000
    for offset in (0, 7, -7, each // 3):
        with me.case(f"{offset} behind the own place in the input"):
            memory = torch.zeros((me.size + 2) * each)
            inputs = [torch.arange(float(me.size * each)) + rank for rank in range(me.size)]
            memory[each:-each] = inputs[me.rank]
            start = (me.rank + 1) * each + offset
            out = memory[start : start + each]
            await me.get(ac.reduce_scatter(memory[each:-each], out=out))
            oracle.same(out, oracle.reduce_scatter(inputs, "sum")[me.rank])


def test_out_is_filled_and_returned(world: World, runner: str) -> None:
    """`out` is the result, and may be the rank's own part of the input."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    x = torch.ones(2 * me.size, 3)
    call = ac.reduce_scatter
    if me.size > 1:
        odd = torch.ones(me.size + 1)
        await me.refuses("odd", ValueError, call, odd, says=(str(me.size + 1), str(me.size)))
    await me.refuses("dim", ValueError, call, x, dim=2, says=("dim", "2"))
    await me.refuses("0-d", MEANINGLESS, call, torch.ones(()))
    await me.refuses("text", MEANINGLESS, call, "text", says=("str",))
    await me.refuses("op", ValueError, call, x, op="median", says=("median", "sum", "avg"))
    await me.check("afterwards", call, x, expect=torch.full((2, 3), float(me.size)))


def test_bad_calls_are_refused(world: World) -> None:
    """Sizes that do not divide, unknown dims and reductions are refused; the lane keeps working."""
    world.run(refused)


async def identity(me: Rank, part: list[int], dim: int, name: str, op: str) -> None:
    shape = [length * me.size if axis == dim else length for axis, length in enumerate(part)]
    x = oracle.counting(me.rank, tuple(shape), oracle.DTYPES[name])
    with me.case(f"{op} of {name} {shape} dim {dim}"):
        got = await me.get(ac.reduce_scatter(x, op=op, dim=dim))
        whole = await me.get(ac.all_reduce(x, op=op))
        oracle.same(got, whole.narrow(dim, me.rank * part[dim], part[dim]), value=True)


@pytest.mark.slow
@given(
    rows=st.integers(0, 3),
    tail=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    dim=st.integers(0, 2),
    choice=st.sampled_from(
        [
            (name, op)
            for name, dtype in oracle.DTYPES.items()
            for op in oracle.reductions(dtype)
            if op != "avg"
        ]
    ),
)
def test_is_all_reduce_indexed_by_rank(
    world: World, rows: int, tail: tuple[int, ...], dim: int, choice: tuple[str, str]
) -> None:
    """reduce_scatter(x) == all_reduce(x)[rank], along any dimension."""
    world.run(identity, [rows, *tail], min(dim, len(tail)), *choice)


async def lists(me: Rank) -> None:
    xs = [torch.full((2,), 10.0 * me.rank + i) for i in range(me.size)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cut = await me.get(ac.reduce_scatter(xs))
        assert [x.shape for x in cut] == [(1,), (1,)]
        (one,) = told
        assert "reduce_scatter cuts each tensor of a list into 2 parts" in str(one.message)
        assert "`y = await ac.reduce_scatter(torch.cat(xs))`" in str(one.message)
        assert one.filename == __file__
        meant = await me.get(ac.reduce_scatter(torch.cat(xs)))
        assert meant.tolist() == [10.0 + 2 * me.rank] * 2
        for other in (tuple(xs), xs[:1], [xs[0], torch.ones(4)], [xs[0], xs[1].double()], {"a": xs}):
            await me.get(ac.reduce_scatter(other))
        assert len(told) == 1


def test_a_list_as_torch_takes_it_is_told(pair: World, runner: str) -> None:
    """Each of its tensors is cut; torch would have summed them and given one to each rank."""
    pair.run(lists, runner=runner)

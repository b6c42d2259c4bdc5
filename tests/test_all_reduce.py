"""all_reduce: every rank gets the reduction of all ranks' values."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
import payloads
from ranks import Rank
from worlds import World

MEANINGLESS = (ValueError, TypeError)
SHAPES = [(), (0,), (3, 0, 2), (1,), (2, 3), (7, 5, 2), (1000,), (100_003,)]
TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def tolerance(dtype: torch.dtype, op: str) -> float:
    """Return the tolerance: one rounding for an average of whole numbers, else 0."""
    return oracle.epsilon(dtype) if op == "avg" else 0.0


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        inputs = oracle.by_rank(oracle.counting, me.size, (5,), dtype)
        for op in oracle.reductions(dtype):
            await me.check(
                f"{op} of {name}",
                ac.all_reduce,
                inputs[me.rank],
                op=op,
                expect=oracle.reduced(inputs, op),
                value=True,
                rtol=tolerance(dtype, op),
            )


def test_every_dtype_and_reduction(world: World, runner: str) -> None:
    """Every reduction that is defined for a dtype gives what NumPy gives."""
    world.run(dtypes, runner=runner)


async def meaningless(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        x = oracle.counting(me.rank, (3,), dtype)
        for op in oracle.refusals(dtype):
            await me.refuses(f"{op} of {name}", MEANINGLESS, ac.all_reduce, x, op=op, says=(op,))
        inputs = oracle.by_rank(oracle.counting, me.size, (3,), dtype)
        await me.check(f"afterwards {name}", ac.all_reduce, x, op="sum", expect=oracle.reduced(inputs, "sum"))


def test_refuses_what_means_nothing(world: World, runner: str) -> None:
    """Averages of integers, order of complex and bits of floats are refused; the lane still works."""
    world.run(meaningless, runner=runner)


async def shapes(me: Rank) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.int16, torch.bool):
            inputs = oracle.by_rank(oracle.counting, me.size, shape, dtype)
            await me.check(
                f"{shape} {dtype}",
                ac.all_reduce,
                inputs[me.rank],
                expect=oracle.reduced(inputs, "sum"),
            )


def test_every_shape(world: World, runner: str) -> None:
    """0-d, empty, one element and many: the shape is kept, and sum is the default."""
    world.run(shapes, runner=runner)


async def layouts(me: Rank) -> None:
    for name, layout in oracle.LAYOUTS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
            inputs = [layout(oracle.counting(r, (4, 3), dtype)) for r in range(me.size)]
            await me.check(
                f"{name} {dtype}",
                ac.all_reduce,
                inputs[me.rank],
                expect=oracle.reduced(inputs, "sum"),
            )
    lazy = [oracle.counting(r, (4,), torch.complex64).conj() for r in range(me.size)]
    eager = [x.resolve_conj() for x in lazy]
    await me.check(
        "conjugated", ac.all_reduce, lazy[me.rank], expect=oracle.reduced(eager, "sum"), value=True
    )
    await me.check(
        "negated",
        ac.all_reduce,
        lazy[me.rank].imag,
        expect=oracle.reduced([x.imag.clone() for x in eager], "sum"),
        value=True,
    )


def test_every_layout(world: World, runner: str) -> None:
    """Transposed, strided, offset, expanded and lazily conjugated inputs give the same."""
    world.run(layouts, runner=runner)


async def spellings(me: Rank) -> None:
    inputs = oracle.by_rank(oracle.counting, me.size, (3,), torch.int32)
    floats = oracle.by_rank(oracle.counting, me.size, (3,), torch.float32)
    for op in oracle.OPS:
        given = floats if op == "avg" else inputs
        spelled: list[Any] = [op.upper(), op.title()]
        spelled += [TORCH_OPS[op]] if op in TORCH_OPS else []
        for spelling in spelled:
            await me.check(
                f"{spelling!r}",
                ac.all_reduce,
                given[me.rank],
                op=spelling,
                expect=oracle.reduced(given, op),
                value=True,
                rtol=1e-6,
            )


def test_reductions_in_any_spelling(pair: World) -> None:
    """Names in any case and torch's own ReduceOp mean the same."""
    pair.run(spellings)


async def wrap(me: Rank) -> None:
    for name in ("uint8", "uint16", "uint32", "uint64"):
        dtype = oracle.INTEGERS[name]
        top = torch.iinfo(dtype).max
        inputs = [torch.tensor([top, top - rank, 1], dtype=dtype) for rank in range(me.size)]
        for op in ("sum", "min", "max", "band", "bxor", "product"):
            await me.check(
                f"{op} of {name}",
                ac.all_reduce,
                inputs[me.rank],
                op=op,
                expect=oracle.reduced(inputs, op),
            )


def test_unsigned_integers_wrap_and_order_by_their_own_rules(world: World) -> None:
    """The top bit is part of the value, not a sign: max, min and modular sums are the unsigned ones."""
    world.run(wrap)


async def extremes(me: Rank) -> None:
    inf, nan = float("inf"), float("nan")
    for name in ("float16", "bfloat16", "float32", "float64"):
        dtype = oracle.FLOATS[name]
        rows = [
            torch.tensor([inf, -inf, nan if rank == 0 else 1.0, -0.0], dtype=dtype) for rank in range(me.size)
        ]
        await me.check(name, ac.all_reduce, rows[me.rank], expect=oracle.reduced(rows, "sum"), value=True)


def test_infinities_and_nan(world: World) -> None:
    """Infinities are kept, and a NaN on any rank reaches all ranks."""
    world.run(extremes)


async def real_values(me: Rank) -> list[float]:
    sources = [torch.Generator().manual_seed(rank) for rank in range(me.size)]
    inputs = [torch.randn(10_001, generator=one) for one in sources]
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    got = await me.get(ac.all_reduce(inputs[me.rank]))
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    return got.tolist()


def test_all_ranks_get_the_same_bits(world: World) -> None:
    """However the sum is rounded, all ranks round it alike."""
    results = world.run(real_values)
    assert all(one == results[0] for one in results)


async def numbers(me: Rank) -> None:
    rows: dict[str, Any] = {
        "small ints": [rank + 1 for rank in range(me.size)],
        "past 2**24": [2**24 + 1 + rank for rank in range(me.size)],
        "past 2**53": [2**53 + 1 + rank for rank in range(me.size)],
        "bits": [(0b1010, 0b0110, 0b1111, 0b0011)[rank] for rank in range(me.size)],
        "with zero": list(range(me.size)),
        "negative": [-(2**62) + rank for rank in range(me.size)],
        "bools": [rank % 2 == 0 for rank in range(me.size)],
        "floats": [0.5 * rank - 1.0 for rank in range(me.size)],
        "complex": [complex(rank, -1.5) for rank in range(me.size)],
    }
    for name, values in rows.items():
        row = "bool" if name == "bools" else "integer"
        row = {"floats": "float", "complex": "complex"}.get(name, row)
        for op in oracle.OPS:
            label, mine = f"{op} of {name}", values[me.rank]
            if op in oracle.MEANINGFUL[row]:
                expect = oracle.reduced_number(values, op)
                await me.check(label, ac.all_reduce, mine, op=op, expect=expect, value=True, rtol=1e-15)
            else:
                await me.refuses(label, MEANINGLESS, ac.all_reduce, mine, op=op)


def test_numbers_keep_their_type(world: World, runner: str) -> None:
    """Sums of ints are exact ints, logical results are bools, averages of floats are floats."""
    world.run(numbers, runner=runner)


async def beyond_64_bits(me: Rank) -> None:
    top = 2**63 - 1
    values = [top - rank for rank in range(me.size)]
    mine = values[me.rank]
    await me.check("sum", ac.all_reduce, mine, expect=sum(values))
    product = oracle.reduced_number(values, "product")
    await me.check("product", ac.all_reduce, mine, op="product", expect=product)
    low = [-(2**63) + rank for rank in range(me.size)]
    await me.check("negative sum", ac.all_reduce, low[me.rank], expect=sum(low))
    await me.refuses("2**64", MEANINGLESS, ac.all_reduce, 2**64 + me.rank)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_sums_of_ints_are_exact_past_64_bits(world: World) -> None:
    """The result may exceed 64 bits; an input that does is refused."""
    world.run(beyond_64_bits)


async def float_bits(me: Rank) -> None:
    for name, make in payloads.NUMBERS.items():
        values = payloads.of_all(make, me.size)
        if type(values[0]) is float and me.size == 1:
            await me.check(name, ac.all_reduce, values[0], expect=values[0])
        elif type(values[0]) is float and name != "largest":
            await me.check(name, ac.all_reduce, values[me.rank], expect=sum(values), value=True, rtol=1e-15)


def test_floats_keep_their_64_bits(world: World) -> None:
    """A number is not rounded to float32 on the wire."""
    world.run(float_bits)


async def trees(me: Rank) -> None:
    for name, make in payloads.TREES.items():
        inputs = payloads.of_all(make, me.size)
        expect = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "sum"), inputs)
        await me.check(name, ac.all_reduce, inputs[me.rank], expect=expect, value=True)
    inputs = payloads.of_all(payloads.flat_dict, me.size)
    expect = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "max"), inputs)
    await me.check("max of dict", ac.all_reduce, inputs[me.rank], op="max", expect=expect)


def test_trees_are_reduced_leaf_by_leaf(world: World, runner: str) -> None:
    """The same tree is returned; leaves match by key, whatever order a rank inserted the keys in."""
    world.run(trees, runner=runner)


async def text(me: Rank) -> None:
    for op in ("sum", "product", "max"):
        await me.refuses(op, MEANINGLESS, ac.all_reduce, "text", op=op, says=("str",))
    await me.refuses("in a tree", MEANINGLESS, ac.all_reduce, {"a": 1, "b": "text"})
    halves = {"a": torch.ones(2), "b": object()}
    await me.refuses("behind a tensor", MEANINGLESS, ac.all_reduce, halves)
    gc.collect()  # so that handles of parts that were sent before the refusal would be reported here
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_text_cannot_be_reduced(world: World, runner: str) -> None:
    """A string is refused under every reduction, also inside a tree, before any part is sent."""
    world.run(text, runner=runner)


async def into_out(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool, torch.float8_e5m2, torch.complex64):
        for shape in ((4,), (), (2, 3), (0,)):
            inputs = oracle.by_rank(oracle.counting, me.size, shape, dtype)
            expect = oracle.reduced(inputs, "sum")
            with me.case(f"separate {dtype} {shape}"):
                out = torch.zeros(shape, dtype=dtype)
                got = await me.get(ac.all_reduce(inputs[me.rank], out=out))
                assert got is out, "the result is not out"
                oracle.same(out, expect)
                again = await me.get(ac.all_reduce(inputs[me.rank], out=out))
                assert again is out, "the second result is not out"
                oracle.same(out, expect)
            with me.case(f"alias {dtype} {shape}"):
                x = inputs[me.rank].clone()
                got = await me.get(ac.all_reduce(x, out=x))
                assert got is x, "the result is not the input"
                oracle.same(x, expect)
    with me.case("strided out"):
        store = torch.zeros(4, 2)
        inputs = oracle.by_rank(oracle.counting, me.size, (4,), torch.float32)
        await me.get(ac.all_reduce(inputs[me.rank], out=store[:, 0]))
        oracle.same(store[:, 0], oracle.reduced(inputs, "sum"))
        oracle.same(store[:, 1], torch.zeros(4))
    for length, offset in itertools.product((20, 700_000), (0, 1, 7, -1, -7)):
        with me.case(f"out lies across {length} of the input, {offset} off"):
            memory = torch.arange(length) + me.rank
            behind, before = memory[abs(offset) :], memory[: length - abs(offset)]
            x, out = (before, behind) if offset > 0 else (behind, before)
            start = 0 if offset > 0 else -offset
            inputs = [torch.arange(start, start + len(x)) + rank for rank in range(me.size)]
            got = await me.get(ac.all_reduce(x, out=out))
            assert got is out, "the result is not out"
            oracle.same(out, oracle.reduced(inputs, "sum"))


def test_out_is_filled_and_returned(world: World, runner: str) -> None:
    """`out` is the result, also a second time and if it is strided; passing the input reduces in place."""
    world.run(into_out, runner=runner)


async def wrong_out(me: Rank) -> None:
    x = torch.ones(4)
    await me.refuses("shape", MEANINGLESS, ac.all_reduce, x, out=torch.empty(5), says=("out",))
    await me.refuses(
        "dtype",
        MEANINGLESS,
        ac.all_reduce,
        x,
        out=torch.empty(4, dtype=torch.float64),
        says=("out",),
    )
    await me.refuses("type", MEANINGLESS, ac.all_reduce, x, out=[0.0] * 4, says=("out",))
    await me.check("afterwards", ac.all_reduce, x, expect=torch.full((4,), float(me.size)))


def test_out_of_another_make_is_refused(pair: World) -> None:
    """`out` must be a tensor of the result's shape and dtype."""
    pair.run(wrong_out)


async def in_flight(me: Rank) -> None:
    inputs = [oracle.by_rank(oracle.counting, me.size, (k + 1,), torch.float32, seed=k) for k in range(40)]
    works = [ac.all_reduce(one[me.rank]) for one in inputs]
    for k in reversed(range(40)):
        with me.case(f"number {k}"):
            oracle.same(await me.get(works[k]), oracle.reduced(inputs[k], "sum"), value=True)


def test_many_in_flight_awaited_backwards(world: World, runner: str) -> None:
    """Forty works in flight together each give their own sum, in whatever order they are awaited."""
    world.run(in_flight, runner=runner)


async def one_example(me: Rank, shape: tuple[int, ...], name: str, op: str, layout: str) -> None:
    dtype = oracle.DTYPES[name]
    inputs = oracle.by_rank(oracle.counting, me.size, shape, dtype)
    if len(shape) == 2 and shape[0]:
        inputs = [oracle.LAYOUTS[layout](x) for x in inputs]
    await me.check(
        f"{op} of {layout} {name} {shape}",
        ac.all_reduce,
        inputs[me.rank],
        op=op,
        expect=oracle.reduced(inputs, op),
        value=True,
        rtol=tolerance(dtype, op),
    )


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    choice=st.sampled_from(
        [(name, op) for name, dtype in oracle.DTYPES.items() for op in oracle.reductions(dtype)]
    ),
    layout=st.sampled_from(sorted(oracle.LAYOUTS)),
)
def test_any_shape_dtype_and_layout(
    world: World, shape: tuple[int, ...], choice: tuple[str, str], layout: str
) -> None:
    """For any shape, dtype, reduction and layout the result agrees with NumPy."""
    world.run(one_example, shape, *choice, layout)

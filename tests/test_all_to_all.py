"""all_to_all: rank r gets the r-th piece of every rank's tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
from asynccoll.runtime.process import current
from ranks import Rank, raising
from worlds import World


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for rows, tail in ((1, ()), (2, (3,)), (0, ()), (1, (0,)), (500, ())):
            inputs = oracle.by_rank(oracle.moving, me.size, (rows * me.size, *tail), dtype)
            await me.check(
                f"{name} {tuple(inputs[0].shape)}",
                ac.all_to_all,
                inputs[me.rank],
                expect=oracle.all_to_all(inputs)[me.rank],
            )


def test_even_pieces_of_every_dtype(world: World, runner: str) -> None:
    """Without splits the tensor is cut evenly along dim 0."""
    world.run(dtypes, runner=runner)


#: SPLITS[kind][a][b]: rows that rank a sends to rank b.
SPLITS = {
    "to the next one only": [[0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 3], [4, 0, 0, 0]],
    "one has nothing": [[0, 0, 0, 0], [1, 2, 3, 4], [2, 0, 1, 5], [1, 1, 1, 1]],
    "one gets nothing": [[1, 0, 2, 1], [3, 0, 1, 1], [0, 0, 4, 2], [2, 0, 2, 2]],
    "all to one": [[3, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [5, 0, 0, 0]],
    "nothing at all": [[0] * 4] * 4,
    "much": [[5000, 1, 0, 7], [1, 4000, 3, 0], [2, 2, 2, 9000], [1, 2, 3, 4]],
}


def cut(splits: list[list[int]], size: int) -> list[list[int]]:
    """Return the splits among the first `size` ranks."""
    return [row[:size] for row in splits[:size]]


async def uneven(me: Rank) -> None:
    for kind, table in SPLITS.items():
        splits = cut(table, me.size)
        for dtype in (torch.float32, torch.int16, torch.bool, torch.float8_e5m2, torch.complex64):
            inputs = [oracle.moving(rank, (sum(splits[rank]), 2), dtype) for rank in range(me.size)]
            await me.check(
                f"{kind} {dtype}",
                ac.all_to_all,
                inputs[me.rank],
                input_split_sizes=splits[me.rank],
                output_split_sizes=[row[me.rank] for row in splits],
                expect=oracle.all_to_all(inputs, splits)[me.rank],
            )
        flat = [oracle.moving(rank, (sum(splits[rank]),), torch.float32) for rank in range(me.size)]
        mine = flat[me.rank]
        if me.rank == 1:  # on the other path than the other ranks
            mine = torch.stack([mine, mine], 1)[:, 0]
        await me.check(
            f"{kind}, in one dimension",
            ac.all_to_all,
            mine,
            input_split_sizes=splits[me.rank],
            output_split_sizes=[row[me.rank] for row in splits],
            expect=oracle.all_to_all(flat, splits)[me.rank],
        )


def test_uneven_pieces(world: World, runner: str) -> None:
    """With splits each piece has the length that both ranks name."""
    world.run(uneven, runner=runner)


def piece(a: int, b: int) -> Any:
    """Return what rank a sends to rank b."""
    kinds = (
        torch.full((a, b + 1), float(10 * a + b)),
        torch.arange(1000 * (a + b), dtype=torch.int16),
        f"{a} to {b}",
        {"from": a, "to": [b, None], "x": torch.tensor([a, b])},
        torch.tensor(a + b, dtype=torch.bfloat16),
    )
    return kinds[(a + b) % len(kinds)]


async def lists(me: Rank) -> None:
    mine = [piece(me.rank, to) for to in range(me.size)]
    came = [piece(source, me.rank) for source in range(me.size)]
    await me.check("lists", ac.all_to_all, mine, expect=came)
    await me.check("a tuple", ac.all_to_all, tuple(mine), expect=came)
    for name, dtype in oracle.DTYPES.items():
        rows = [[oracle.moving(a, (b + 1, 2), dtype, seed=b) for b in range(me.size)] for a in range(me.size)]
        await me.check(name, ac.all_to_all, rows[me.rank], expect=[row[me.rank] for row in rows])


def test_lists_of_anything(world: World, runner: str) -> None:
    """Part j goes to rank j; its receiver need not know shapes, dtypes or kinds."""
    world.run(lists, runner=runner)


async def refused_lists(me: Rank) -> None:
    short, splits = [torch.ones(1)] * (me.size + 1), [1] * me.size
    says = (str(me.size + 1), str(me.size))
    await me.refuses("number", ac.InvalidArgumentError, ac.all_to_all, short, says=says)
    bad = [object()] * me.size
    await me.refuses("object", ac.PayloadTypeError, ac.all_to_all, bad, says=("object",))
    await me.refuses("splits", ac.InvalidArgumentError, ac.all_to_all, splits, input_split_sizes=splits)
    await me.refuses("out", ac.InvalidArgumentError, ac.all_to_all, splits, out=torch.ones(1))
    x = torch.ones(2, requires_grad=True)
    with me.case("gradient"):
        got = await me.get(ac.all_to_all([2 * x] * me.size))
        with raising(ac.UnsupportedOpError, "all_to_all of one tensor"):
            got[0].sum().backward()
    await me.check("afterwards", ac.all_to_all, [me.rank] * me.size, expect=list(range(me.size)))


def test_bad_lists_are_refused(world: World) -> None:
    """A wrong number of parts, other objects and options for one tensor are refused; so is a gradient."""
    world.run(refused_lists)


async def layouts(me: Rank) -> None:
    for name, layout in oracle.LAYOUTS.items():
        inputs = [layout(oracle.moving(r, (2 * me.size, 3), torch.int16)) for r in range(me.size)]
        await me.check(name, ac.all_to_all, inputs[me.rank], expect=oracle.all_to_all(inputs)[me.rank])


def test_every_layout(world: World, runner: str) -> None:
    """Non-contiguous inputs give the same."""
    world.run(layouts, runner=runner)


async def into_out(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        inputs = oracle.by_rank(oracle.moving, me.size, (2 * me.size,), dtype)
        expect = oracle.all_to_all(inputs)[me.rank]
        with me.case(f"separate {dtype}"):
            out = torch.zeros_like(expect)
            got = await me.get(ac.all_to_all(inputs[me.rank], out=out))
            assert got is out, "the result is not out"
            oracle.same(out, expect)
        with me.case(f"alias {dtype}"):
            x = inputs[me.rank].clone()
            got = await me.get(ac.all_to_all(x, out=x))
            assert got is x, "the result is not the input"
            oracle.same(x, expect)
        for count in (2, 40_000):
            with me.case(f"across {dtype} {count}"):
                inputs = oracle.by_rank(oracle.moving, me.size, (count * me.size,), dtype)
                memory = torch.zeros(count * me.size + 1, dtype=dtype)
                memory[:-1] = inputs[me.rank]
                await me.get(ac.all_to_all(memory[:-1], out=memory[1:]))
                oracle.same(memory[1:], oracle.all_to_all(inputs)[me.rank])


def test_out_is_filled_and_returned(world: World, runner: str) -> None:
    """`out` is the result, and may be the input."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    call, size = ac.all_to_all, me.size
    x = torch.ones(2 * size, 3)
    if size > 1:
        odd = torch.ones(size + 1)
        await me.refuses("odd", ValueError, call, odd, says=(str(size + 1), str(size)))
    wrong = [1] * size
    await me.refuses(
        "sum",
        ValueError,
        call,
        x,
        input_split_sizes=wrong,
        output_split_sizes=wrong,
        says=("split",),
    )
    await me.refuses(
        "length", ValueError, call, x, input_split_sizes=[2] * (size + 1), says=("split", str(size))
    )
    negative = [2 * size + 1, *[-1] * (size - 1)] if size > 1 else [-1]
    await me.refuses("negative", ValueError, call, x, input_split_sizes=negative, says=("split", "-1"))
    await me.refuses("0-d", (ValueError, TypeError), call, torch.ones(()))
    await me.refuses("text", (ValueError, TypeError), call, "text", says=("str",))
    await me.check("afterwards", call, x, expect=x)


def test_bad_splits_are_refused(world: World) -> None:
    """Splits that do not fit the tensor or the group are refused; the lane still works."""
    world.run(refused)


async def unfitting(me: Rank) -> None:
    first, last = me.rank == 0, me.rank == me.size - 1
    evenly = [1] * me.size
    sent = [*evenly[:-1], 2] if first else evenly
    x = oracle.moving(me.rank, (sum(sent),), torch.float32)
    says = r"rank 0: all_to_all, 2 rows to rank (\d).*\n  rank \1: all_to_all, 1 rows expected from rank 0 at"
    lane = current().world.lane("default")
    with me.case("splits"), pytest.raises(ac.CollectiveMismatchError, match=says) as caught:
        await me.get(ac.all_to_all(x, input_split_sizes=sent, output_split_sizes=evenly))
    assert f" as call #{lane.sequence} on " in str(caught.value)
    again = ac.prepare("all_to_all", x, input_split_sizes=sent, output_split_sizes=evenly)
    for _ in range(2):
        with me.case("prepared"), pytest.raises(ac.CollectiveMismatchError, match=says) as caught:
            await me.get(again.start())
        assert f" as call #{lane.sequence} on " in str(caught.value)
    received = [2, *evenly[1:]] if last else evenly
    with me.case("fitting"):
        got = await me.get(ac.all_to_all(x, input_split_sizes=sent, output_split_sizes=received))
        assert got.shape == (sum(received),)
    longer = torch.ones((2 if first else 1) * me.size)
    with me.case("even"), pytest.raises(ac.CollectiveMismatchError, match=r"all_to_all|rows from each rank"):
        await me.get(ac.all_to_all(longer))
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


@pytest.mark.processes
def test_splits_that_do_not_fit_between_ranks(several: World, runner: str) -> None:
    """Such calls raise; before, gloo aborted the process and MPI returned whatever was in memory."""
    several.run(unfitting, runner=runner)


async def twice(me: Rank, rows: int, tail: tuple[int, ...], name: str) -> None:
    x = oracle.moving(me.rank, (rows * me.size, *tail), oracle.DTYPES[name])
    with me.case(f"{name} {tuple(x.shape)}"):
        oracle.same(await me.get(ac.all_to_all(await me.get(ac.all_to_all(x)))), x)


@given(
    rows=st.integers(0, 4),
    tail=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    name=st.sampled_from(sorted(oracle.DTYPES)),
)
def test_twice_is_the_identity(world: World, rows: int, tail: tuple[int, ...], name: str) -> None:
    """all_to_all(all_to_all(x)) == x."""
    world.run(twice, rows, tail, name)


async def there_and_back(me: Rank, splits: list[list[int]], name: str) -> None:
    sent, received = splits[me.rank], [row[me.rank] for row in splits]
    x = oracle.moving(me.rank, (sum(sent),), oracle.DTYPES[name])
    with me.case(f"{name} {splits}"):
        there = await me.get(ac.all_to_all(x, input_split_sizes=sent, output_split_sizes=received))
        back = await me.get(ac.all_to_all(there, input_split_sizes=received, output_split_sizes=sent))
        oracle.same(back, x)


@pytest.mark.slow
@given(
    splits=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=4, max_size=4),
    name=st.sampled_from(sorted(oracle.DTYPES)),
)
def test_any_splits_there_and_back(world: World, splits: list[list[int]], name: str) -> None:
    """Sending everything back with the splits swapped restores the input."""
    world.run(there_and_back, cut(splits, world.size), name)

"""scatter: rank r gets the r-th of the values that ``src`` passes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
from ranks import Rank
from worlds import World


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for turn, shape in enumerate([(), (0,), (1,), (3, 2), (4, 0, 2), (1025,)]):
            src = turn % me.size
            values = oracle.by_rank(oracle.moving, me.size, shape, dtype)
            await me.check(
                f"{name} {shape} from {src}",
                ac.scatter,
                values if me.rank == src else None,
                src=src,
                expect=values[me.rank],
            )


def test_lists_of_every_dtype_and_shape(world: World, runner: str) -> None:
    """src passes a list and the others None: shape and dtype are sent with the data."""
    world.run(dtypes, runner=runner)


async def whole(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex128):
        for tail in ((), (3,), (2, 0)):
            for rows in (1, 3):
                src = rows % me.size
                x = oracle.moving(src, (rows * me.size, *tail), dtype)
                await me.check(
                    f"{dtype} {tuple(x.shape)} from {src}",
                    ac.scatter,
                    x if me.rank == src else None,
                    src=src,
                    expect=oracle.parts(x, me.size)[me.rank],
                )


def test_a_tensor_is_cut_along_dim_0(world: World, runner: str) -> None:
    """A tensor whose first dimension is divisible by the number of ranks is split in rank order."""
    world.run(whole, runner=runner)


async def unequal(me: Rank) -> None:
    shapes = [(2, 3), (5,), (), (0, 4)]
    names = ["float32", "int16", "bool", "float8_e5m2"]
    values = [oracle.moving(r, shapes[r], oracle.DTYPES[names[r]]) for r in range(me.size)]
    await me.check("unequal", ac.scatter, values if me.rank == 0 else None, expect=values[me.rank])
    for name, layout in oracle.LAYOUTS.items():
        rows = [layout(oracle.moving(r, (4, 3), torch.float32)) for r in range(me.size)]
        await me.check(name, ac.scatter, rows if me.rank == 0 else None, expect=rows[me.rank])


def test_pieces_may_differ_and_be_laid_out_in_any_way(world: World, runner: str) -> None:
    """Each piece has its own shape and dtype; src is rank 0 by default."""
    world.run(unequal, runner=runner)


async def values(me: Rank) -> None:
    size = me.size
    pieces: dict[str, list[Any]] = {
        "numbers": [1, 2.5, True, 2j][:size],
        "texts": ["é", "", "x" * 2000, "\udc80"][:size],
        "trees": [{"x": torch.full((rank,), float(rank)), "n": [rank, None]} for rank in range(size)],
        "mixed": [torch.arange(3), 7, ("a", torch.ones(700)), None][:size],
        "alike": [None] * size,
    }
    for name, parts in pieces.items():
        for src in range(size):
            mine = parts if me.rank == src else None
            await me.check(f"{name} from {src}", ac.scatter, mine, src=src, expect=parts[me.rank])


def test_numbers_and_trees(world: World, runner: str) -> None:
    """Each rank gets exactly the value that src listed for it, whatever the other values are."""
    world.run(values, runner=runner)


async def objects(me: Rank) -> None:
    if me.rank == 0:
        says = ("scatter", "object", "_object functions")
        await me.refuses("object", ac.PayloadTypeError, ac.scatter, [object()] * me.size, says=says)
        await me.refuses("in a tree", ac.PayloadTypeError, ac.scatter, [{"x": {1}}] * me.size, says=("set",))
    else:
        await me.refuses("object", ac.PeerRefusedError, ac.scatter, None)
        await me.refuses("in a tree", ac.PeerRefusedError, ac.scatter, None)
    await me.check("afterwards", ac.scatter, [1] * me.size if me.rank == 0 else None, expect=1)


def test_other_objects_are_for_scatter_object(world: World) -> None:
    """The error names the ``_object`` functions, and the lane remains usable."""
    world.run(objects)


async def into_out(me: Rank) -> None:
    values = oracle.by_rank(oracle.moving, me.size, (2, 3), torch.int16)
    for src in range(me.size):
        with me.case(f"from {src}"):
            out = torch.zeros(2, 3, dtype=torch.int16)
            sent = values if me.rank == src else None
            got = await me.get(ac.scatter(sent, src=src, out=out))
            assert got is out, "the result is not out"
            oracle.same(out, values[me.rank])


def test_out_is_filled_and_returned(world: World, runner: str) -> None:
    """``out`` is filled and returned."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    size = me.size
    bad: dict[str, tuple[Any, tuple[str, ...]]] = {
        "too few": ([torch.ones(1)] * (size - 1), (str(size - 1), str(size))),
        "too many": ([torch.ones(1)] * (size + 1), (str(size + 1), str(size))),
        "0-d": (torch.ones(()), ("[]",)),
    }
    if size > 1:
        bad["does not divide"] = (torch.ones(size + 1), (str(size + 1), str(size)))
    for name, (value, says) in bad.items():
        for src in range(size):
            mine = value if me.rank == src else None
            if me.rank == src:
                label = f"{name} from {src}"
                await me.refuses(label, (ValueError, TypeError), ac.scatter, mine, src=src, says=says)
            else:
                await me.refuses(f"{name} from {src}", ac.PeerRefusedError, ac.scatter, mine, src=src)
    await me.refuses("nothing", (ValueError, TypeError), ac.scatter, None, src=me.rank)
    await me.refuses("src", ValueError, ac.scatter, None, src=size, says=(str(size),))
    pieces = [torch.tensor([rank]) for rank in range(size)] if me.rank == 0 else None
    await me.check("afterwards", ac.scatter, pieces, expect=torch.tensor([me.rank]))


def test_bad_lists_are_refused_on_every_rank(world: World) -> None:
    """The error of src says what is wrong with its list; the others' errors say that their peer refused."""
    world.run(refused, timeout=60)


async def round_trip(me: Rank, rows: int, tail: tuple[int, ...], name: str, src: int) -> None:
    x = oracle.moving(src, (rows * me.size, *tail), oracle.DTYPES[name])
    with me.case(f"{name} {tuple(x.shape)} from {src}"):
        mine = await me.get(ac.scatter(x if me.rank == src else None, src=src))
        oracle.same(await me.get(ac.all_gather(mine)), x)


@given(
    rows=st.integers(0, 4),
    tail=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    name=st.sampled_from(sorted(oracle.DTYPES)),
    src=st.integers(0, 3),
)
def test_all_gather_undoes_scatter(
    world: World, rows: int, tail: tuple[int, ...], name: str, src: int
) -> None:
    """all_gather(scatter(x)) == x."""
    world.run(round_trip, rows, tail, name, src % world.size)

"""broadcast: every rank gets the payload of `src`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
import payloads
from ranks import Rank
from worlds import World


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for turn, shape in enumerate([(), (0,), (1,), (3, 2), (4, 0, 2), (4097,)]):
            src = turn % me.size
            inputs = oracle.by_rank(oracle.moving, me.size, shape, dtype)
            await me.check(
                f"{name} {shape} from {src}",
                ac.broadcast,
                inputs[me.rank],
                src=src,
                expect=inputs[src],
            )


def test_every_dtype_and_shape(world: World, runner: str) -> None:
    """src's tensor arrives bit for bit, and no rank's input is changed."""
    world.run(dtypes, runner=runner)


async def one_of_a_column(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        inputs = oracle.by_rank(oracle.moving, me.size, (3, 2), dtype)
        await me.check(name, ac.broadcast, inputs[me.rank][:1, 0], src=0, expect=inputs[0][:1, 0])


def test_one_element_of_a_column(pair: World) -> None:
    """Such an element is contiguous, but its stride is not one."""
    pair.run(one_of_a_column)


class Subclass(torch.Tensor):
    """A subclass of Tensor as users derive it."""


async def derived(me: Rank) -> None:
    for calls, expect in ((ac.broadcast, 2.0), (ac.all_reduce, 2.0 * me.size)):
        x = torch.full((3,), 2.0).as_subclass(Subclass)
        oracle.same((await me.get(calls(x))).as_subclass(torch.Tensor), torch.full((3,), expect))


def test_a_subclass_of_tensor(pair: World) -> None:
    """Its values are sent."""
    pair.run(derived)


async def layouts(me: Rank) -> None:
    for name, layout in oracle.LAYOUTS.items():
        for dtype in (torch.float32, torch.int16, torch.bool, torch.float8_e4m3fn):
            inputs = [layout(oracle.moving(r, (4, 3), dtype)) for r in range(me.size)]
            await me.check(f"{name} {dtype}", ac.broadcast, inputs[me.rank], expect=inputs[0])
    lazy = [oracle.counting(r, (4,), torch.complex64).conj() for r in range(me.size)]
    await me.check("conjugated", ac.broadcast, lazy[me.rank], expect=lazy[0].resolve_conj(), value=True)


def test_every_layout(world: World, runner: str) -> None:
    """Non-contiguous tensors arrive with their values; src is rank 0 by default."""
    world.run(layouts, runner=runner)


async def values(me: Rank) -> None:
    for src in range(me.size):
        for name, make in payloads.MOVABLE.items():
            inputs = payloads.of_all(make, me.size)
            await me.check(f"{name} from {src}", ac.broadcast, inputs[me.rank], src=src, expect=inputs[src])


def test_numbers_and_text(world: World, runner: str) -> None:
    """Numbers arrive bit for bit, as do Unicode and paths, with src's type."""
    world.run(values, runner=runner)


async def trees(me: Rank) -> None:
    for name, make in {**payloads.TREES, **payloads.TEXT_TREES}.items():
        src = me.size - 1
        inputs = payloads.of_all(make, me.size)
        await me.check(name, ac.broadcast, inputs[me.rank], src=src, expect=inputs[src])


def test_trees(world: World, runner: str) -> None:
    """The tree of src arrives leaf by leaf, with None as structure."""
    world.run(trees, runner=runner)


async def safe_mode(me: Rank) -> None:
    sent: dict[str, Any] = {
        "tensor": oracle.moving(0, (2, 3), torch.int16),
        "0-d": oracle.moving(0, (), torch.float8_e5m2),
        "more than a slot": oracle.moving(0, (1000,), torch.float32),
        "empty": oracle.moving(0, (0, 4), torch.bool),
        "int": 2**63 - 1,
        "float": 0.1,
        "text": "日本語",
        "tree": payloads.nested(0),
    }
    others: list[Any] = [None, 7, "anything", torch.ones(1)]
    for src in range(me.size):
        for name, value in sent.items():
            for other in others:
                mine = value if me.rank == src else other
                await me.check(
                    f"{name} from {src} over {other!r}",
                    ac.broadcast,
                    mine,
                    src=src,
                    safe_mode=True,
                    expect=value,
                )


async def own_result(me: Rank) -> None:
    for count in (10, 1000):
        x = torch.zeros(count)
        result = await me.get(ac.broadcast(x, src=0, safe_mode=True))
        result += 1
        assert not x.any(), f"the input of {count} was changed with the result"


def test_safe_mode_gives_a_result_of_its_own(world: World, runner: str) -> None:
    """src gets its own copy, too, whatever its size."""
    world.run(own_result, runner=runner)


def test_safe_mode_takes_anything_elsewhere(world: World, runner: str) -> None:
    """With safe_mode the other ranks may pass None or anything else."""
    world.run(safe_mode, runner=runner)


async def into_out(me: Rank) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        inputs = oracle.by_rank(oracle.moving, me.size, (2, 3), dtype)
        src = me.size - 1
        with me.case(f"separate {dtype}"):
            out = torch.zeros(2, 3, dtype=dtype)
            got = await me.get(ac.broadcast(inputs[me.rank], src=src, out=out))
            assert got is out, "the result is not out"
            oracle.same(out, inputs[src])
        with me.case(f"alias {dtype}"):
            x = inputs[me.rank].clone()
            got = await me.get(ac.broadcast(x, src=src, out=x))
            assert got is x, "the result is not the input"
            oracle.same(x, inputs[src])


def test_out_is_filled_and_returned(world: World, runner: str) -> None:
    """`out` is the result, and may be the input."""
    world.run(into_out, runner=runner)


async def refused(me: Rank) -> None:
    await me.refuses("src", ValueError, ac.broadcast, torch.ones(1), src=me.size, says=(str(me.size),))
    await me.refuses("type", TypeError, ac.broadcast, object(), says=("object",))
    await me.check("afterwards", ac.broadcast, me.rank, expect=0)


def test_bad_calls_are_refused(world: World) -> None:
    """A source out of range and an unsupported payload are refused; the lane still works."""
    world.run(refused)


async def one_text(me: Rank, value: str, src: int) -> None:
    mine = value if me.rank == src else ""
    await me.check(f"{value!r} from {src}", ac.broadcast, mine, src=src, expect=value)


@given(value=st.text(max_size=300), src=st.integers(0, 1))
def test_any_text(pair: World, value: str, src: int) -> None:
    """Any Unicode text arrives unchanged."""
    pair.run(one_text, value, src)


async def one_number(me: Rank, value: float) -> None:
    await me.check(f"{value!r}", ac.broadcast, value if me.rank == 0 else 0.0, expect=value)


@pytest.mark.slow
@given(value=st.floats())
def test_any_float(pair: World, value: float) -> None:
    """Any float arrives bit for bit."""
    pair.run(one_number, value)

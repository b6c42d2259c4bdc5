"""Ranks of one host or of several call different things: each rank is told, and the lane keeps working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccoll as ac
import worlds
from patience import patient
from ranks import Rank, raising
from worlds import World

X = torch.arange(8, dtype=torch.float32, device="cpu")
LARGE = torch.ones(3 << 20, device="cpu")

#: What rank 0 calls, what the others call, and a word of each call that every rank's error must show.
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "operation": (lambda: ac.all_reduce(X), lambda: ac.all_gather(X), "all_reduce", "all_gather"),
    "size": (lambda: ac.all_reduce(X), lambda: ac.all_reduce(X[:4]), "[8]", "[4]"),
    "steps": (lambda: ac.all_reduce(LARGE), lambda: ac.all_reduce(X), "[3145728]", "[8]"),
    "shape": (
        lambda: ac.all_reduce(X.view(2, 4)),
        lambda: ac.all_reduce(X.view(4, 2)),
        "[2, 4]",
        "[4, 2]",
    ),
    "dtype": (lambda: ac.all_reduce(X), lambda: ac.all_reduce(X.int()), "float32", "int32"),
    "reduction": (lambda: ac.all_reduce(X), lambda: ac.all_reduce(X, op="max"), "sum", "max"),
    "root": (lambda: ac.broadcast(X, src=0), lambda: ac.broadcast(X, src=1), "src=0", "src=1"),
    "number": (lambda: ac.all_reduce(1), lambda: ac.all_reduce(1, op="max"), "sum", "max"),
    "object": (lambda: ac.all_gather_object(1), ac.barrier, "object", ": barrier at "),
    "tree": (
        lambda: ac.all_reduce({"a": X, "b": X}),
        lambda: ac.all_reduce({"a": X, "c": X}),
        "'b'",
        "'c'",
    ),
    "parts": (
        lambda: ac.all_reduce({"a": X, "b": X.int()}),
        lambda: ac.all_reduce({"a": X}),
        "'b': *",
        "dict('a': *)",
    ),
    "leaves": (
        lambda: ac.all_reduce([X[:4], X]),
        lambda: ac.all_reduce([X, X[:4]]),
        "[4] [8]",
        "[8] [4]",
    ),
}


ONE_HOST = [(one, (0,) * size) for one in ("memory", "gloo") for size in (2, 3, 4)]
#: A launcher would assign these nodes; all ranks are on this machine.
HOSTS = [
    ("gloo", (0, 1)),
    ("gloo", (0, 1, 2)),
    ("gloo", (0, 0, 1)),
    ("gloo", (0, 0, 1, 1)),
    ("memory", (0, 0, 1, 1)),
]
#: Where there are several hosts, ranks are placed as MPICH places them.
ON_MPI = [("mpi", nodes) for nodes in ((0, 0), (0, 0, 0), (0, 1), (0, 1, 2), (0, 1, 0, 1))]
WORLDS = ON_MPI if worlds.BACKENDS == ["mpi"] else [*ONE_HOST, *HOSTS]
#: The nightly run adds one more of each kind.
BY_NIGHT = [
    ("gloo", (0,) * 4),
    ("memory", (0,) * 4),
    ("gloo", (0, 1, 2)),
    ("mpi", (0, 0, 0)),
    ("mpi", (0, 1)),
]


@pytest.fixture(
    params=[pytest.param(one, marks=[pytest.mark.nightly] * (one in BY_NIGHT)) for one in WORLDS],
    ids=[f"{backend}-{''.join(map(str, nodes))}" for backend, nodes in WORLDS],
)
def world(request: pytest.FixtureRequest) -> World:
    backend, nodes = request.param
    several = {"nodes": nodes} if any(nodes) else {}
    return worlds.world(backend, len(nodes), **several)


async def in_step(me: Rank) -> None:
    """Retry until a call works: calls already behind one whose parts were lost may be lost, too."""
    while True:
        try:
            total = await me.get(ac.all_reduce(X + me.rank))
        except ac.PeerRefusedError:
            continue
        break
    assert torch.equal(total, sum((X + rank for rank in range(me.size)), torch.zeros(8)))


async def differing(me: Rank, name: str, in_memory: bool) -> None:
    one, other, said, told = PAIRS[name]
    # A sender need not wait for ranks that disagree: ranks that agree on a root may complete, and so may a
    # single rank on MPI. Not if all of them meet in memory.
    may_end = name == "root" and not in_memory and (me.rank > 0 or me.backend == "mpi")
    for _ in range(3):  # each time the lane must be in step afterwards
        work = one() if me.rank == 0 else other()
        # In a call of several parts, a rank may first hear that a peer gives up the rest of it, and why.
        told_by = ac.CollectiveError if name == "parts" else ac.CollectiveMismatchError
        try:
            await me.get(work)
        except told_by as error:
            assert type(error) in (ac.CollectiveMismatchError, ac.PeerRefusedError)
            text = str(error)
            assert said in text and told in text, text
            assert "test_mismatch.py:" in text, text
        else:
            assert may_end, "nobody was told"
        await in_step(me)


async def straight_afterwards(me: Rank) -> None:
    others: dict[str, Callable[[], Any]] = {
        "a leaf less": lambda: ac.all_reduce({"a": X, "b": X.int()}),
        "no tree": lambda: ac.all_reduce(X),
    }
    for name, other in others.items():
        for turn in range(3):
            x = {"a": X, "b": X.int(), "c": 1.0}
            with me.case(name), raising(ac.CollectiveMismatchError, "test_mismatch.py:") as caught:
                await me.get(ac.all_reduce(x) if me.rank else other())
            assert isinstance(caught.error, ac.CollectiveMismatchError)
            assert caught.error.ranks == (), "of two sides nobody is the culprit"
            await me.check(f"after {name} {turn}", ac.all_reduce, X, expect=X * me.size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.skipif("memory" not in worlds.BACKENDS, reason="of ranks that share memory")
def test_who_was_told_may_call_at_once(size: int) -> None:
    """If memory compares calls as they are made, the call after the differing ones is not lost with them."""
    worlds.world("memory", size).run(straight_afterwards, timeout=patient(30))


async def one_with_more(me: Rank) -> None:
    """Rank 0's block has one call more than the others', whose ranks wait for their own calls only."""
    for _ in range(3):
        with ac.coalescing():
            works: list[Any] = [ac.all_reduce(X), ac.all_reduce(X[:4], op="max")]
            if me.rank == 0:
                works.append(ac.broadcast(X, src=1))
        for work in works:
            with raising(
                ac.CollectiveMismatchError, "all_reduce max):", "all_reduce max, broadcast src=1):"
            ) as caught:
                await me.get(work)
            assert str(caught.error).count("test_mismatch.py:") == 2, caught.error
        await in_step(me)


def test_a_block_with_more_calls_on_one_rank_is_told_of_on_all(world: World) -> None:
    """This holds also if the others make no further calls."""
    world.run(one_with_more, runner="asyncio", timeout=30)


async def more_after_an_await(me: Rank, extra: int) -> None:
    """The block of rank ``extra`` has one more call, after an await; the others make no call meanwhile."""
    for turn in range(2):
        with ac.coalescing():
            works: list[Any] = [ac.all_reduce(X), ac.all_reduce(X)]
            await me.get(works[0])
            if me.rank == extra:
                works.append(ac.all_reduce(X))
        if me.rank == extra:
            with raising(ac.CollectiveMismatchError, "all_reduce", "end of coalescing") as caught:
                await me.get(works.pop())
            assert str(caught.error).count("test_mismatch.py:") == 2, caught.error
            me.show(f"parts {extra} {turn}")
        else:
            me.see(f"parts {extra} {turn}")
        for work in works:
            assert torch.equal(await me.get(work), X * me.size)
        await in_step(me)


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_block_with_one_more_after_an_await_is_told_while_others_call_nothing(
    world: World, first: bool
) -> None:
    """The call fails long before its deadline, because the block has ended on the others."""
    world.run(
        more_after_an_await,
        0 if first else world.size - 1,
        runner="asyncio",
        timeout=30,
    )


async def block_of_a_tree(me: Rank) -> None:
    """Calls of several parts inside a block are compared as a whole, too."""
    with ac.coalescing():
        before = ac.all_reduce(X)
        await me.get(before)
        work = ac.all_reduce({"a": X, "b" if me.rank else "c": X})
    with raising((ac.CollectiveMismatchError, ac.PeerRefusedError), "'b'", "'c'"):
        await me.get(work)
    await in_step(me)


def test_a_tree_in_a_block_is_compared_as_one(world: World) -> None:
    world.run(block_of_a_tree, runner="asyncio", timeout=30)


@pytest.mark.parametrize("name", PAIRS)
def test_every_rank_is_told_what_both_sides_called(world: World, name: str) -> None:
    in_memory = world.backend == "memory" and "nodes" not in world.options
    world.run(differing, name, in_memory, runner="asyncio", timeout=30)

"""Collectives in inference mode: their results can only be written to there, yet they complete elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import asynccoll as ac
import oracle
from asynccoll.tensors.common import OFFLOAD_BYTES
from ranks import Rank
from worlds import World

#: One element, a few, and so many that a thread copies them.
COUNTS = (1, 8, OFFLOAD_BYTES // 4 + 1)


def calls(me: Rank, count: int) -> dict[str, tuple[Callable[[], ac.Work[Any]], Any]]:
    """Return each call with its expected result, for a vector of rank + 1."""
    size = me.size
    total = float(sum(range(1, size + 1)))
    mine, every = torch.full((count,), me.rank + 1.0), torch.full((size * count,), me.rank + 1.0)
    again = mine.clone()
    tree = {"flat": mine, "deep": [mine.view(-1, 1), mine.double()]}
    sums, first = torch.full((count,), total), torch.ones(count)
    ranks = torch.arange(1.0, size + 1).repeat_interleave(count)
    return {
        "all_reduce": (lambda: ac.all_reduce(mine), sums),
        "of a new lane": (lambda: ac.all_reduce(mine, op="avg", lane=f"mode {count}"), sums / size),
        "average": (lambda: ac.all_reduce(mine, op="avg"), sums / size),
        "product": (lambda: ac.all_reduce(mine > 0, op="product"), mine > 0),
        "into out": (lambda: ac.all_reduce(mine, out=torch.empty(count)), sums),
        "in place": (lambda: ac.all_reduce(again, out=again), sums),
        "factors": (lambda: ac.all_reduce(mine, prescale=0.5, compression="fp16"), sums / 2),
        "tree": (lambda: ac.all_reduce(tree), {"flat": sums, "deep": [sums.view(-1, 1), sums.double()]}),
        "mapped": (lambda: ac.all_reduce(mine).map(lambda x: x.neg_()), -sums),
        "reduce_scatter": (lambda: ac.reduce_scatter(every), sums),
        "broadcast": (lambda: ac.broadcast(mine), first),
        "all_gather": (lambda: ac.all_gather(mine), ranks),
        "uneven": (lambda: ac.all_gather(mine, uneven=True), list(ranks.chunk(size))),
        "object": (lambda: ac.broadcast_object({"x": mine}), {"x": first}),
    }


async def inferring(me: Rank, awaited_inside: bool) -> None:
    for count in COUNTS:
        with torch.inference_mode():
            made = calls(me, count)
        for name, (call, expect) in made.items():
            with me.case(f"{name} of {count}"):
                with torch.inference_mode():
                    work = call()
                    if awaited_inside:
                        await me.get(work)
                oracle.same(await me.get(work), expect)


@pytest.mark.parametrize("awaited_inside", [False, True])
def test_what_is_called_in_inference_mode(world: World, runner: str, awaited_inside: bool) -> None:
    """The result is right wherever it is waited for; no thread of ours writes to it in another mode."""
    world.run(inferring, awaited_inside, runner=runner)


async def prepared_inside(me: Rank) -> None:
    x = torch.full((4,), me.rank + 1.0)
    total = float(sum(range(1, me.size + 1)))
    with torch.inference_mode():
        made = {
            "all_reduce": (ac.prepare("all_reduce", x, op="avg"), torch.full((4,), total / me.size)),
            "of a tree": (ac.prepare("all_reduce", [x, x]), [torch.full((4,), total)] * 2),
            "broadcast": (ac.prepare("broadcast", x), torch.ones(4)),
            "reduce_scatter": (ac.prepare("reduce_scatter", x.repeat(me.size)), torch.full((4,), total)),
        }
        filled = torch.empty(4)
        into = ac.prepare("all_reduce", x, out=filled)
    for name, (operation, expect) in made.items():
        with me.case(name):
            oracle.same(await me.get(operation.start()), expect)
            with torch.inference_mode():
                oracle.same(await me.get(operation.start()), expect)
    with me.case("into what inference mode made"):
        with pytest.raises(ac.InvalidArgumentError, match="started outside of it"):
            into.start()
        with torch.inference_mode():
            oracle.same(await me.get(into.start()), torch.full((4,), total))


def test_what_is_prepared_in_inference_mode_starts_in_any(pair: World, runner: str) -> None:
    """Its own memory serves every mode; the caller's is refused in a mode in which it cannot be filled."""
    pair.run(prepared_inside, runner=runner)


async def filled_outside(me: Rank) -> None:
    with torch.inference_mode():
        tree = [torch.ones(4), torch.ones(3), torch.ones(2, dtype=torch.int16)]
    folded = [torch.ones(1).expand(4), torch.ones(3)]
    for name, call in {"all_reduce": ac.all_reduce, "broadcast": ac.broadcast}.items():
        for leaves, why in ((tree, "made in inference mode"), (folded, "share the same memory")):
            with me.case(f"{name}, {why}"), pytest.raises(ac.InvalidArgumentError, match=why):
                call(leaves, out=leaves)
    with torch.inference_mode():
        await me.get(ac.all_reduce(tree, out=tree))
    oracle.same(tree, [torch.full_like(x, me.size) for x in tree])


def test_trees_that_cannot_be_filled_in_place_are_refused(pair: World, runner: str) -> None:
    """They are refused before anything is sent, as a single tensor is."""
    pair.run(filled_outside, runner=runner)


class Seeing(TorchDispatchMode):
    """A mode that records the operations it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def unseen(me: Rank) -> None:
    if me.backend != "memory":
        return
    x = torch.ones(300_000)  # takes many steps
    with Seeing() as mode:
        ac.all_reduce(x, out=x).wait()
        (ac.recv(x, src=0) if me.rank else ac.send(x, dst=1)).wait()
    assert not [name for name in mode.seen if "copy" in name or "add" in name], mode.seen


def test_no_mode_sees_how_data_goes_through_memory(pair: World) -> None:
    """A mode would count such operations, or refuse them half-way, which would break the lane."""
    pair.run(unseen, runner="blocking")


def without_data(me: Rank) -> None:
    from torch._subclasses import FakeTensorMode  # slow to import

    n = float(me.size)
    for x in (torch.ones(2), torch.ones(300_000)):
        with me.case(f"of {x.numel()}"):
            slope = torch.func.grad(lambda a, x=x: (a * ac.all_reduce(x).wait()).sum())(torch.ones_like(x))
            oracle.same(slope, torch.full_like(x, n))
            rows = torch.func.vmap(lambda a, x=x: a * ac.all_reduce(x).wait())(torch.ones(3, x.numel()))
            oracle.same(rows, torch.full((3, x.numel()), n))
            before = ac.all_reduce(x, op="avg")
            with FakeTensorMode():
                total, mean = ac.all_reduce(x).wait(), before.wait()
                again = ac.prepare("all_reduce", x).start().wait()
            for got, value in ((total, n), (mean, 1.0), (again, n)):
                oracle.same(got, torch.full_like(x, value))
    numbers = list(range(1000))
    with me.case("objects"), FakeTensorMode():
        assert ac.broadcast_object(None if me.rank else numbers).wait() == numbers
        assert ac.all_reduce({"a": 1, "b": 1.5}).wait() == {"a": n, "b": 1.5 * n}
    oracle.same(ac.all_reduce(torch.ones(2)).wait(), torch.full((2,), n))


def test_calls_are_of_data_also_where_tensors_have_none(pair: World) -> None:
    """In FakeTensorMode and inside transformations, the process once crashed, or the lane was lost."""
    pair.run(without_data, runner="blocking")

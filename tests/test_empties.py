"""Tensors without elements, in every form of a call: results have the shapes that one process would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import asynccoll as ac
import oracle
from patience import patient
from ranks import Rank
from worlds import World

SHAPES = ((0,), (0, 3), (4, 0), (4, 0, 2))
#: Leaves of a tree, some or all of them without elements.
TREES = (((0, 3), (0, 3)), ((0, 3), (2, 2), (4, 0)), ((0,), (0,)), ((), (0, 3)))
FUSED: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, **how: ac.all_reduce(x, op="max", **how),
    "broadcast": lambda x, **how: ac.broadcast(x, src=1, **how),
}


def places() -> list[torch.device]:
    """Return the devices of users' tensors: the CPU, and the device of a backend that has one."""
    host = torch.device("cpu")
    return [host] if ac.device() == host else [host, ac.device()]


def on_host(value: Any) -> Any:
    """Return the value on the CPU, where the oracle compares it."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    return [on_host(one) for one in value] if isinstance(value, list) else value


def calls(me: Rank) -> dict[str, tuple[Callable[..., Any], Callable[[list[torch.Tensor], int], Any]]]:
    """Return each collective of one tensor, and what a rank gets given all ranks' tensors."""
    size, last = me.size, me.size - 1
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    return {
        "all_reduce": (ac.all_reduce, lambda xs, _: oracle.reduced(xs, "sum")),
        "avg": (lambda x, **how: ac.all_reduce(x, op="avg", **how), lambda xs, _: xs[0]),
        "broadcast": (lambda x, **how: ac.broadcast(x, src=last, **how), lambda xs, _: xs[last]),
        "reduce": (
            lambda x, **how: ac.reduce(x, dst=last, **how),
            lambda xs, rank: oracle.reduce(xs, "sum", last)[rank],
        ),
        "all_gather": (ac.all_gather, lambda xs, _: oracle.concatenated(xs)),
        "by columns": (
            lambda x, **how: ac.all_gather(x, dim=-1, **how),
            lambda xs, _: oracle.concatenated(xs, -1),
        ),
        "gather": (
            lambda x, **how: ac.gather(x, dst=last, **how),
            lambda xs, rank: oracle.gather(xs, last)[rank],
        ),
        "reduce_scatter": (
            ac.reduce_scatter,
            lambda xs, rank: oracle.reduce_scatter(xs, "sum")[rank],
        ),
        "all_to_all": (ac.all_to_all, lambda xs, rank: oracle.all_to_all(xs)[rank]),
        "permute": (
            lambda x, **how: ac.permute(x, ring, **how),
            lambda xs, rank: oracle.permute(xs, ring)[rank],
        ),
        "scatter": (
            lambda x, **how: ac.scatter(x if me.rank == 0 else None, src=0, **how),
            lambda xs, rank: oracle.parts(xs[0], size)[rank],
        ),
    }


async def of_one_tensor(me: Rank) -> None:
    for name, (call, expected) in calls(me).items():
        for shape in SHAPES:
            xs = oracle.by_rank(oracle.counting, me.size, shape, torch.float32)
            want = expected(xs, me.rank)
            for place in places():
                x = xs[me.rank].to(place)
                with me.case(f"{name} {shape} on {place}"):
                    oracle.same(on_host(await me.get(call(x))), want)
                with me.case(f"{name} {shape} on {place}, coalesced"):
                    with ac.coalescing():
                        works = [call(x), call(torch.ones(me.size, device=place)), call(x)]
                    oracle.same([on_host(await me.get(work)) for work in works][::2], [want, want])
                out = None if want is None else torch.empty(want.shape, device=place)
                with me.case(f"{name} {shape} on {place}, out="):
                    got = await me.get(call(x, out=out))
                    assert got is out
                    oracle.same(on_host(got), want)


def test_every_collective_of_nothing(pair: World) -> None:
    """Each is called alone, in a coalescing block, and with out=."""
    pair.run(of_one_tensor, runner="asyncio", timeout=patient(60))


async def of_trees(me: Rank) -> None:
    for name, call in FUSED.items():
        for shapes in TREES:
            inputs = [
                {str(k): oracle.counting(rank, shape, torch.float64) for k, shape in enumerate(shapes)}
                for rank in range(me.size)
            ]
            want = {
                key: oracle.reduced([one[key] for one in inputs], "max") if name == "all_reduce" else x
                for key, x in inputs[1].items()
            }
            for place in places():
                with me.case(f"{name} {shapes} on {place}"):
                    await _of_tree(me, name, call, {k: x.to(place) for k, x in inputs[me.rank].items()}, want)


async def _of_tree(me: Rank, name: str, call: Callable[..., Any], x: Any, want: Any) -> None:
    def empty() -> Any:
        return {key: torch.zeros_like(leaf) for key, leaf in x.items()}

    oracle.same(on_host(await me.get(call(x))), want)
    out = empty()
    assert await me.get(call(x, out=out)) is out
    oracle.same(on_host(out), want)
    with ac.coalescing():
        works = [call(x), call(x, out=out), *(call(leaf) for leaf in x.values())]
        works += [call(leaf, out=out) for leaf, out in zip(x.values(), empty().values(), strict=True)]
    got = [on_host(await me.get(work)) for work in works]
    oracle.same(got, [want, want, *want.values(), *want.values()])
    how = {"op": "max"} if name == "all_reduce" else {"src": 1}
    for target in (None, empty()):
        prepared = ac.prepare(name, x, **how, **({} if target is None else {"out": target}))
        for _ in range(2):
            oracle.same(on_host(await me.get(prepared.start())), want)
    filled = {key: leaf.clone() for key, leaf in x.items()}
    assert await me.get(call(filled, out=filled)) is filled
    oracle.same(on_host(filled), want)


def test_trees_with_leaves_of_nothing(pair: World) -> None:
    """Also with out=, in place, prepared, and in a block: torch's own packing loses their dimensions."""
    pair.run(of_trees, runner="asyncio", timeout=patient(60))

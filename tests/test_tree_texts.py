"""The error for ranks that pass different trees names the leaf or node at which the trees differ."""

from __future__ import annotations

import enum
import gc
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import asynccoll as ac
from asynccoll.plan.tree_texts import Outline, differing, packed, shown_part
from asynccoll.plan.trees import flatten
from asynccoll.testing import simulate


@dataclass
class Layer:
    weight: Any
    bias: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def model(layers: int, at: int, shape: tuple[int, ...]) -> dict[str, dict[str, torch.Tensor]]:
    return {f"layer{i}": {"w": x(4, 4), "b": x(*(shape if i == at else (4,)))} for i in range(layers)}


#: The trees of rank 0 and of the others, and what the error says of where they differ.
TREES: dict[str, tuple[Any, ...]] = {
    "one shape of many": (
        lambda: model(40, 7, (4,)),
        lambda: model(40, 7, (5,)),
        "['layer7']['b']: float32 [4] on rank 0, but float32 [5] on OTHERS",
    ),
    "a dtype": (
        lambda: [x(2), x(3)],
        lambda: [x(2), x(3, dtype=torch.float64)],
        "[1]: float32 [3] on rank 0, but float64 [3] on OTHERS",
    ),
    "two dtypes exchanged": (
        lambda: {"a": x(2), "b": x(2, dtype=torch.float64)},
        lambda: {"a": x(2, dtype=torch.float64), "b": x(2)},
        "['a']: float32 [2] on rank 0, but float64 [2] on OTHERS",
        "['b']: float64 [2] on rank 0, but float32 [2] on OTHERS",
    ),
    "a number": (
        lambda: [1, x(2)],
        lambda: [x(1), x(2)],
        "[0]: number on rank 0, but float32 [1] on OTHERS",
    ),
    "a long key": (
        lambda: {"k" * 5000: x(2)},
        lambda: {"k" * 5000: x(3)},
        f"['{'k' * 55}...{'k' * 58}']: float32 [2] on rank 0, but float32 [3] on OTHERS",
    ),
    "a key more": (
        lambda: {"a": x(2), "b": {"c": x(2), "d": x(3)}},
        lambda: {"a": x(2)},
        "['b']: dict on rank 0, but missing on OTHERS",
    ),
    "another key": (
        lambda: {"a": x(2), 1: x(2)},
        lambda: {"a": x(2), None: x(2)},
        "[1]: float32 [2] on rank 0, but missing on OTHERS",
        "[None]: missing on rank 0, but float32 [2] on OTHERS",
    ),
    "a field": (
        lambda: [Layer(x(2), x(2)), Layer(x(2), x(2))],
        lambda: [Layer(x(2), x(2)), Layer(x(2), None)],
        "[1].bias: float32 [2] on rank 0, but None on OTHERS",
    ),
    "of a named tuple": (
        lambda: Pair(x(2), [x(2), x(2)]),
        lambda: Pair(x(2), [x(2), x(1, 2)]),
        ".second[1]: float32 [2] on rank 0, but float32 [1, 2] on OTHERS",
    ),
    "the class of a node": (
        lambda: {"a": [x(2), x(3)]},
        lambda: {"a": (x(2), x(3))},
        "['a']: list on rank 0, but tuple on OTHERS",
    ),
    "the whole": (
        lambda: OrderedDict(a=x(2)),
        lambda: {"a": x(2)},
        "the tree itself: OrderedDict on rank 0, but dict on OTHERS",
    ),
    "a tensor beside values": (
        lambda: {"a": 1.0, "b": x(2), "c": x(3)},
        lambda: {"a": 1.0, "b": x(2), "c": x(4)},
        "['c']: float32 [3] on rank 0, but float32 [4] on OTHERS",
    ),
    "everything": (
        lambda: [x(1) for _ in range(5)],
        lambda: [x(2) for _ in range(5)],
        *(f"[{i}]: float32 [1] on rank 0, but float32 [2] on OTHERS" for i in range(3)),
        "and elsewhere",
    ),
}


#: Trees whose descriptions begin alike, as far as they are shown.
ALIKE_AT_FIRST = ("one shape of many", "a long key")


@pytest.mark.parametrize("what", TREES)
@pytest.mark.parametrize("check", ["local", "full"])
@pytest.mark.parametrize(("size", "transport", "nodes"), [(2, "gloo", 1), (3, "memory", 1), (2, "gloo", 2)])
def test_the_leaf_that_differs_is_named(what: str, check: str, size: int, transport: str, nodes: int) -> None:
    first, others, *differ = TREES[what]

    async def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ac.all_reduce(others() if rank else first())
        return str(caught.value)

    report = simulate(main, world_size=size, check=check, transport=transport, nodes=nodes)
    report.check()
    expected = "; ".join(differ).replace("OTHERS", "rank 1" if size == 2 else "ranks 1, 2")
    for said in report.results.values():
        assert re.findall(r"^\(the trees differ at (.*)\)$", said, re.MULTILINE) == [expected]
        side = r"^  ranks? ([\d, ]+): (all_reduce .* at .*test_tree_texts\.py:\d+)$"
        sides = dict(re.findall(side, said, re.MULTILINE))
        assert sorted(", ".join(sides).split(", ")) == [str(rank) for rank in range(size)]
        assert len(set(sides.values())) == len(sides)  # sides that begin alike are shown once
        assert (len(sides) == 1) == (what in ALIKE_AT_FIRST)
        assert max(map(len, said.splitlines())) < 400


def test_trees_that_are_alike_are_not_said_to_differ() -> None:
    async def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ac.all_reduce(model(9, 0, (4,)), op="max" if rank else "sum")
        return str(caught.value)

    report = simulate(main, world_size=2)
    report.check()
    for said in report.results.values():
        assert " sum " in said and " max " in said and "trees differ" not in said


#: Collectives that send each tensor of a tree separately.
ONE_BY_ONE: dict[str, Callable[[Any], Any]] = {
    "all_gather": ac.all_gather,
    "gather": lambda tree: ac.gather(tree, dst=0),
    "reduce": lambda tree: ac.reduce(tree, dst=0),
    "reduce_scatter": ac.reduce_scatter,
    "permute": lambda tree: ac.permute(tree, [(0, 1), (1, 0)]),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("check", ["local", "full"])
@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_the_leaf_is_named_where_each_is_sent_by_itself(name: str, check: str, transport: str) -> None:
    async def main(rank: int) -> str:
        dtype = torch.float64 if rank else torch.float32
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ONE_BY_ONE[name]({"a": x(4), "b": x(4), "c": x(4, dtype=dtype), "d": 1} | numbers)
        return str(caught.value)

    numbers = {} if name in ("all_gather", "gather", "reduce") else {"d": x(2)}
    report = simulate(main, world_size=2, check=check, transport=transport)
    report.check()
    for said in report.results.values():
        assert "(the trees differ at ['c']: float32 [4] on rank 0, but float64 [4] on rank 1)" in said


def test_a_leaf_that_may_be_uneven_is_not_said_to_differ() -> None:
    async def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ac.all_gather({"a": x(4 + rank), "b": 1 if rank else "one"}, uneven=True)
        return str(caught.value)

    report = simulate(main, world_size=2)
    report.check()
    for said in report.results.values():
        assert "(the trees differ at ['b']: str on rank 0, but number on rank 1)" in said


def test_a_sparse_leaf_is_told_from_a_dense_one() -> None:
    async def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ac.all_reduce([x(2), x(3) if rank else x(3).to_sparse()])
        return str(caught.value)

    report = simulate(main, world_size=2, transport="memory")
    report.check()
    for said in report.results.values():
        assert "(the trees differ at [1]: float32 [3] sparse on rank 0, but float32 [3] on rank 1)" in said


@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize("check", ["local", "full"])
def test_where_a_rank_has_no_tree_none_is_said_to_differ(check: str, transport: str) -> None:
    async def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ac.all_reduce([x(2), x(3)] if rank else x(2))
        return str(caught.value)

    report = simulate(main, world_size=2, check=check, transport=transport)
    report.check()
    for said in report.results.values():
        assert "list(*, *)" in said and "trees differ" not in said


@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize("prepares", [False, True])
def test_nothing_of_a_tree_is_kept_with_what_is_known_of_its_kind(transport: str, prepares: bool) -> None:
    """What rebuilds a dataclass, or a dict subclass, holds the tensors that were passed."""

    async def main() -> int:
        sent = []
        for size in range(1, 9):
            for tree in (Layer(x(size), x(2)), OrderedDict(a=x(size), b=x(2))):
                sent.append(weakref.ref(tree.weight if isinstance(tree, Layer) else tree["a"]))
                await (ac.prepare("all_reduce", tree).start() if prepares else ac.all_reduce(tree))
        del tree
        gc.collect()
        return sum(one() is not None for one in sent)

    report = simulate(main, world_size=2, transport=transport)
    report.check()
    assert report.results == {0: 0, 1: 0}


def test_what_a_peer_has_packed_is_read_as_far_as_it_is_readable() -> None:
    leaves, spec = flatten({"a": [x(2), x(3)], "b": x(4)})
    text = "shown" + packed((("all_reduce", Outline.of(spec, leaves)), ("all_reduce", "sum")))
    whole, alike = text.partition("shown")[2], differing([0, 1], [text, text])
    assert alike == "" and shown_part(text) == "shown"
    for cut in range(len(whole)):
        assert len(differing([0, 1], [text, f"shown{whole[:cut]}"])) < 1000
    for garbage in ("\x1f", "\x1f\x1f", "\x1f\ufffd\ufffd", "\x1f" + "~" * 2000, "\x1f" + "0" * 5, "\0"):
        assert differing([0, 1], [text, f"shown{garbage}"]) == ""


@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize("check", ["local", "full"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_names_that_are_not_unicode_break_no_call(check: str, transport: str, nodes: int) -> None:
    """The names are that of a directory, as Python represents it, and that of a key."""
    key = enum.Enum("Odd", {"\udc80": 1})(1)
    known: dict[str, Any] = {"ac": ac}
    exec(compile("def call(tree):\n    return ac.all_reduce(tree)\n", "/d\udcfcr/program.py", "exec"), known)

    async def main(rank: int) -> tuple[list[float], str]:
        found = (await known["call"]({key: x(2)}))[key].tolist()
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await known["call"]({key: x(2 + rank)})
        return found, str(caught.value)

    report = simulate(main, world_size=2, check=check, transport=transport, nodes=nodes)
    report.check()
    for found, said in report.results.values():
        assert found == [2.0, 2.0]
        assert r"/d\udcfcr/program.py:2" in said
        assert r"differ at [<Odd.\udc80: 1>]: float32 [2] on rank 0, but float32 [3] on rank 1" in said


def filled_twice() -> None:
    y = x(2)
    work = ac.all_reduce(y, op="avg", out=y)
    try:
        ac.all_reduce({"a": x(2), "b": y})
    finally:
        work.wait()


INTS = torch.ones(2, dtype=torch.int64)

#: Calls that are refused for one of their leaves, and the path of that.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (lambda: ac.all_reduce({"a": x(2), "b": 3}, op="avg"), "['b']"),
    "dtypes": (lambda: ac.all_reduce([x(2), {"n": INTS}, {"n": INTS}], op="avg"), "[1]['n']"),
    "a set": (lambda: ac.all_gather(Layer(x(2), {1})), ".bias"),
    "no data": (lambda: ac.broadcast(Pair(x(2), [x(2, 3).to("meta")])), ".second[0]"),
    "nested": (lambda: ac.all_gather([1, torch.nested.nested_tensor([x(2), x(3)])]), "[1]"),
    "rows": (lambda: ac.reduce_scatter({"a": x(2), "b": x(3)}), "['b']"),
    "of a part": (lambda: ac.all_to_all([x(2), {"b": {1}}]), "[1]['b']"),
    "filled by an earlier call": (filled_twice, "['b']"),
    "another shape": (lambda: ac.all_reduce([x(2), x(2)], out=[x(2), x(3)]), "[1]"),
    "one element of many": (lambda: ac.broadcast([x(2), x(2)], out=[x(2), x(1).expand(2)]), "[1]"),
    "multiplied": (lambda: ac.all_reduce([x(2), INTS], prescale=0.5), "[1]"),
    "prepared": (lambda: ac.prepare("all_reduce", {"a": x(2), "b": INTS}, op="avg"), "['b']"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_leaf_for_which_a_tree_is_refused_is_named(what: str) -> None:
    call, path = REFUSED[what]

    async def main() -> str:
        with pytest.raises(ac.AsyncCollError) as caught:
            call()
        return str(caught.value)

    report = simulate(main, world_size=2)
    report.check()
    for said in report.results.values():
        assert said.endswith(f" (leaf {path})")

"""Ranks that pass different trees are told at which leaf, or node, these differ."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import asynccoll as ac
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


#: The trees of rank 0 and of the others; where they differ, as the error says it.
TREES: dict[str, tuple[Any, ...]] = {
    "one shape of many": (
        lambda: model(40, 7, (4,)),
        lambda: model(40, 7, (5,)),
        "['layer7']['b']: float32 [4] on rank 0, but float32 [5] on OTHERS",
    ),
    "a dtype": (
        lambda: [x(2), x(3)],
        lambda: [x(2), x(3, dtype=torch.float64)],
        "[1]: float32 [3] on rank 0, but of another kind on OTHERS",
    ),
    "two dtypes exchanged": (
        lambda: {"a": x(2), "b": x(2, dtype=torch.float64)},
        lambda: {"a": x(2, dtype=torch.float64), "b": x(2)},
        "['a']: float32 [2] on rank 0, but float64 [2] on OTHERS",
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
        assert (
            len(
                re.findall(
                    r"^  ranks? [\d, ]+: all_reduce .* at .*test_tree_texts\.py:\d+$", said, re.MULTILINE
                )
            )
            == 2
        )
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

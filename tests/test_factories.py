"""Tensors that the package creates for itself are on the CPU, whatever default device the caller has set."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import asynccoll as ac
import worlds
from ranks import Rank

FACTORIES = frozenset({"empty", "zeros", "ones", "tensor", "full", "arange", "eye", "scalar_tensor"})


def makes_one(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    return of_torch and node.func.attr in FACTORIES


def test_every_factory_call_names_its_device() -> None:
    """This holds for every file of the package."""
    bare = [
        f"{path.name}:{node.lineno}"
        for path in Path(ac.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if makes_one(node)
        and isinstance(node, ast.Call)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert bare == []


async def under_meta(me: Rank) -> None:
    x = torch.ones(3)
    total = [float(me.size)] * 3
    with torch.device("meta"):
        assert await me.get(ac.all_reduce(1)) == me.size
        assert (await me.get(ac.all_reduce(x))).tolist() == total
        assert [y.tolist() for y in await me.get(ac.all_reduce([x, x + 1]))] == [total, [2.0 * me.size] * 3]
        assert (await me.get(ac.all_gather(x))).tolist() == [1.0] * 3 * me.size
        assert await me.get(ac.all_gather_object(me.rank)) == list(range(me.size))
        assert await me.get(ac.broadcast("text", src=0)) == "text"
        await me.get(ac.barrier())


def test_calls_under_another_default_device() -> None:
    """Results for numbers, tensors, trees and objects do not depend on it."""
    worlds.world("gloo", 2).run(under_meta, timeout=40)

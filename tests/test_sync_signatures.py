"""``asynccoll.sync`` has the names and the signatures of the real ``ignite.distributed``."""

from __future__ import annotations

import importlib
import inspect

import ignite.distributed as theirs
import pytest

import asynccoll.sync as ours

MODULES = ("utils", "auto", "launcher")
NAMES = {
    name: module
    for module in MODULES
    for name in importlib.import_module(f"ignite.distributed.{module}").__all__
}


def test_every_public_name_is_there():
    assert sorted(ours.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_it_is_where_the_documentation_of_ignite_says(name):
    module = importlib.import_module(f"asynccoll.sync.{NAMES[name]}")
    assert getattr(module, name) is getattr(ours, name)
    assert name in module.__all__


def _parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", sorted(n for n in NAMES if callable(getattr(theirs, n))))
def test_signatures_are_the_same(name):
    assert _parameters(getattr(ours, name)) == _parameters(getattr(theirs, name))


@pytest.mark.parametrize("method", ["__init__", "__enter__", "__exit__", "run"])
def test_parallel_has_the_same_methods(method):
    mine, real = (getattr(module.Parallel, method) for module in (ours, theirs))
    if method != "__exit__":  # Python calls it, with three positional arguments
        assert _parameters(mine) == _parameters(real)


def test_models_and_backends_have_their_names():
    assert ours.available_backends() == theirs.available_backends()
    mine = [(model.name, model.available_backends) for model in ours.registered_computation_models]
    real = [(model.name, model.available_backends) for model in theirs.registered_computation_models]
    assert mine == real
    for name in ("has_native_dist_support", "has_xla_support", "has_hvd_support"):
        assert getattr(ours, name) == getattr(theirs, name)

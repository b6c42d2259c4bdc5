"""ignite's metrics, engine and handlers compute the same numbers on ``asynccoll.sync``."""

from __future__ import annotations

import pytest
import torch

import ignite_handlers
import ignite_on_sync
import worlds


@pytest.fixture(
    params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids=["gloo-2", "gloo-4"], scope="module"
)
def pair(request):
    """A world on the real ignite.distributed, and one with asynccoll.sync in its place."""
    with worlds.fresh("gloo", request.param) as aliased:
        yield worlds.world("gloo", request.param), aliased


def close(got, expected, where, rtol=1e-6):
    assert type(got) is type(expected), where
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for index, (mine, real) in enumerate(zip(got, expected, strict=True)):
            close(mine, real, f"{where}[{index}]", rtol)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            close(got[key], value, f"{where}[{key!r}]", rtol)
    elif isinstance(expected, (str, bool)):
        assert got == expected, where
    else:
        different = f"{where}: {got} != {expected}"
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-8, msg=different)


@pytest.mark.slow
def test_metrics(pair):
    real, aliased = (
        world.run(ignite_on_sync.metrics, flag, timeout=60.0)
        for world, flag in zip(pair, (False, True), strict=True)
    )
    assert len(real[0]) >= 12
    whole = ignite_on_sync.compute([ignite_on_sync.batches(rank) for rank in range(pair[0].size)])
    for rank, found in enumerate(aliased):
        close(found, real[rank], f"rank {rank}")
        for name, value in whole.items():  # summed in another order, in float32
            close(found[name], value, f"rank {rank} against one process: {name}", rtol=1e-4)


def test_training_with_handlers(pair):
    real, aliased = (
        world.run(ignite_on_sync.training, flag, timeout=60.0)
        for world, flag in zip(pair, (False, True), strict=True)
    )
    for rank, found in enumerate(aliased):
        close(found, real[rank], f"rank {rank}")
    assert aliased[0]["files"]
    assert len({str(found["weights"]) for found in aliased}) == 1


def test_handlers(pair):
    real, aliased = (
        world.run(ignite_handlers.handlers, flag, timeout=60.0)
        for world, flag in zip(pair, (False, True), strict=True)
    )
    for rank, found in enumerate(aliased):
        close(found, real[rank], f"rank {rank}")
    assert len(aliased[0]["lr finder"]["loss"]) > 3
    assert aliased[0]["files"] == [f"checkpoint_{epoch}.pt" for epoch in (1, 2, 3)]

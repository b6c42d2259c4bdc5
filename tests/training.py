"""A data-parallel training script for launchers to start, whose result is known from one process.

    python training.py parallel DIRECTORY   through `ac.Parallel`, which joins the launcher's world
    python training.py sync DIRECTORY       the same through `asynccoll.sync`, as programs written for ignite
    python training.py bare DIRECTORY       through `ac.initialize()`

Each rank writes a JSON file there, with its place and the weights after the last step. The environment
variable PARALLEL holds further arguments for `Parallel`, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import asynccoll as ac

STEPS = 5
ROWS = 12  # divisible by 1, 2, 3 and 4 ranks


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all rows and their labels."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return rows, rows @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def train(rank: int, size: int, average) -> list[float]:
    """Fit least squares by gradient steps, each rank on its own rows. Returns the final weights."""
    rows, labels = data()
    rows, labels = rows[rank::size], labels[rank::size]
    weights = torch.zeros(3, dtype=torch.float64)
    for _ in range(STEPS):
        gradient = 2 * rows.T @ (rows @ weights - labels) / len(rows)
        weights = weights - 0.1 * average(gradient)
    return weights.tolist()


def expected() -> list[float]:
    """Return the weights that one process computes on all rows."""
    return train(0, 1, lambda gradient: gradient)


def mean(x: torch.Tensor) -> torch.Tensor:
    """Average over the ranks, through ``asynccoll``."""
    return ac.all_reduce(x, op="avg").wait()


def mean_by_sync(x: torch.Tensor) -> torch.Tensor:
    """Average over the ranks, as programs for ignite do it."""
    import asynccoll.sync as idist

    return idist.all_reduce(x) / idist.get_world_size()


def main(local_rank: int, directory: str, module: str = "asynccoll") -> None:
    """Train as one rank, and write the result; through ``asynccoll`` or ``asynccoll.sync``."""
    world = importlib.import_module(module)
    average = mean if world is ac else mean_by_sync
    weights = train(world.get_rank(), world.get_world_size(), average)
    said = {
        "rank": world.get_rank(),
        "size": world.get_world_size(),
        "local": local_rank,
        "per_node": world.get_nproc_per_node(),
        "node": world.get_node_rank(),
        "nodes": world.get_nnodes(),
        "backend": world.backend(),
        "slurm_node": os.environ.get("SLURMD_NODENAME"),
        "host": world.hostname(),
        "weights": weights,
    }
    Path(directory, f"rank-{world.get_rank()}").write_text(json.dumps(said))


def ranks(directory: Path, size: int, **same: object) -> list[dict]:
    """Read the files of all ``size`` ranks; check that each contains ``same``, and has trained correctly."""
    found = [json.loads(path.read_text()) for path in directory.glob("rank-*")]
    found.sort(key=lambda one: one["rank"])
    assert [(one["rank"], one["size"]) for one in found] == [(rank, size) for rank in range(size)]
    for one in found:
        assert {name: one[name] for name in same} == same
        assert one["weights"] == pytest.approx(expected(), abs=1e-12)
    return found


def check(directory: Path, wanted: list[tuple[int, int]], **same: object) -> list[dict]:
    """Do the same, and check each rank's place: ``wanted`` lists (node, local rank)."""
    found = ranks(directory, len(wanted), **same)
    assert [(one["node"], one["local"]) for one in found] == wanted
    for one in found:
        assert one["nodes"] == len({node for node, _ in wanted})
        assert one["per_node"] == [node for node, _ in wanted].count(one["node"])
    return found


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        ac.initialize()
        main(ac.get_local_rank(), sys.argv[2])
        ac.finalize()
    else:
        name = "asynccoll.sync" if sys.argv[1] == "sync" else "asynccoll"
        options = {"backend": "gloo", **json.loads(os.environ.get("PARALLEL", "{}"))}
        with importlib.import_module(name).Parallel(**options) as started:
            started.run(main, sys.argv[2], name)

"""A training script for launchers to start: data parallel, with a result known from one process.

    python training.py parallel DIRECTORY   through `ac.Parallel`, which joins what the launcher made
    python training.py bare DIRECTORY       through `ac.initialize()`

Each rank leaves a file of JSON there: where it finds itself, and the weights after the last step.
The variable PARALLEL holds further arguments for `Parallel`, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import asynccoll as ac

STEPS = 5
ROWS = 12  # divides among 1, 2, 3 and 4 ranks


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All rows and their labels."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return rows, rows @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def train(rank: int, size: int, average) -> list[float]:
    """Least squares by gradient steps, each rank on its own rows; the weights at the end."""
    rows, labels = data()
    rows, labels = rows[rank::size], labels[rank::size]
    weights = torch.zeros(3, dtype=torch.float64)
    for _ in range(STEPS):
        gradient = 2 * rows.T @ (rows @ weights - labels) / len(rows)
        weights = weights - 0.1 * average(gradient)
    return weights.tolist()


def expected() -> list[float]:
    """The weights that one process comes to on all rows."""
    return train(0, 1, lambda gradient: gradient)


def main(local_rank: int, directory: str) -> None:
    """One rank: train, and tell."""
    weights = train(ac.get_rank(), ac.get_world_size(), lambda x: ac.all_reduce(x, op="avg").wait())
    said = {
        "rank": ac.get_rank(),
        "size": ac.get_world_size(),
        "local": local_rank,
        "per_node": ac.get_nproc_per_node(),
        "node": ac.get_node_rank(),
        "nodes": ac.get_nnodes(),
        "backend": ac.backend(),
        "slurm_node": os.environ.get("SLURMD_NODENAME"),
        "host": ac.hostname(),
        "weights": weights,
    }
    Path(directory, f"rank-{ac.get_rank()}").write_text(json.dumps(said))


def ranks(directory: Path, size: int, **same: object) -> list[dict]:
    """What all ``size`` ranks left: each says what is the ``same`` for all, and has trained."""
    found = [json.loads(path.read_text()) for path in directory.glob("rank-*")]
    found.sort(key=lambda one: one["rank"])
    assert [(one["rank"], one["size"]) for one in found] == [(rank, size) for rank in range(size)]
    for one in found:
        assert {name: one[name] for name in same} == same
        assert one["weights"] == pytest.approx(expected(), abs=1e-12)
    return found


def check(directory: Path, wanted: list[tuple[int, int]], **same: object) -> list[dict]:
    """The same, and each rank is where ``wanted`` says: (node, local rank)."""
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
        with ac.Parallel(**{"backend": "gloo", **json.loads(os.environ.get("PARALLEL", "{}"))}) as parallel:
            parallel.run(main, sys.argv[2])

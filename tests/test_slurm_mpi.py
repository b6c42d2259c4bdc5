"""MPI in a SLURM job: started by srun with PMI, or by mpiexec inside an allocation.

MPI decides which ranks share a node. It may see the two nodes as one machine, which they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import needs
import training
from asynccoll.launch import mpiexec
from slurm_cluster import NODES, Cluster

needs.need_package("mpi4py", "mpi", "the environments mpich and openmpi have it")

pytestmark = pytest.mark.slow

TRAINING = str(Path(training.__file__))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, started once and removed without a trace."""
    needs.need("slurm-wlm", "munge")
    made = Cluster(needs.PATH)
    yield made
    made.close()


def test_mpiexec_in_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    """mpiexec asks SLURM for the nodes; its own variables place each rank, and the backend is mpi."""
    launcher = mpiexec.find()
    program = [sys.executable, TRAINING, "bare", str(tmp_path)]
    line = launcher.command(4, program)
    if launcher.family == "mpich":  # the usual flags are for ranks on one host
        line = [launcher.path, "-n", "4", *program]
    as_root = {name: "1" for name in launcher.environment({}) if name.startswith("OMPI_ALLOW")}
    ended = cluster.call("salloc", "-N2", "--ntasks-per-node=2", *line, **as_root)
    assert ended.code == 0, ended.said
    found = training.ranks(tmp_path, 4, backend="mpi")
    if launcher.family == "mpich":  # Open MPI starts the ranks of the first node itself
        assert [one["slurm_node"] for one in found] == [NODES[0]] * 2 + [NODES[1]] * 2


@pytest.mark.parametrize("within", [["salloc", "-N2"], ["srun", "-N1", "-n1"]], ids=lambda words: words[0])
def test_asynccoll_run_starts_ranks_on_its_own_node(
    cluster: Cluster, tmp_path: Path, within: list[str]
) -> None:
    """mpiexec would use all nodes, and within a task would wait forever for a step to start its ranks."""
    line = [sys.executable, "-m", "asynccoll", "run", "--backend", "mpi", "-n", "2"]
    ended = cluster.call(*within, *line, TRAINING, "bare", str(tmp_path))
    assert ended.code == 0, ended.said
    found = training.ranks(tmp_path, 2, backend="mpi", nodes=1)
    assert len({one["slurm_node"] for one in found}) == 1


def test_srun_as_the_launcher_of_mpi(cluster: Cluster, tmp_path: Path) -> None:
    """With PMI, which the MPICH wheel speaks, the ranks meet; without it, their error says what to do."""
    line = ["srun", "-N2", "-n2", sys.executable, TRAINING, "parallel", str(tmp_path)]
    if mpiexec.find().family == "mpich":
        ended = cluster.call(*line, SLURM_MPI_TYPE="pmi2", PARALLEL='{"backend": "mpi"}')
        assert ended.code == 0, ended.said
        training.ranks(tmp_path, 2, backend="mpi")
    ended = cluster.call(*line, SLURM_MPI_TYPE="none", PARALLEL='{"backend": "mpi"}')
    assert ended.code != 0
    assert "LaunchEnvironmentError" in ended.err, ended.said
    assert "srun --mpi" in ended.err, ended.said

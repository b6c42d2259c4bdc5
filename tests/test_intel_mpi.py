"""Ranks under Intel MPI's own mpiexec, on gloo: its environment has the launcher, the ranks' has no MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import envbuild
import needs
from envs import ENVIRONMENTS
from patience import patient
from ports import free_port
from worlds import rank_environment

RANKS = 3
WHO = """
import sys
import asynccoll as ac
from asynccoll.launch import detect
import os
ac.initialize("gloo")
total = ac.all_reduce(ac.get_rank() + 1).wait()
place = ac.get_rank(), ac.get_world_size(), ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes()
sys.stdout.write(f"{detect(os.environ).launcher} {ac.backend()} {place} {total}\\n")
"""


def test_ranks_of_intel_mpi_find_their_place(tmp_path: Path) -> None:
    """Its mpiexec sets the same variables as MPICH's; the user says where the ranks meet."""
    directory = envbuild.directory(ENVIRONMENTS["impi"])
    if not envbuild.is_complete(directory):
        needs.absent("Intel MPI's mpiexec not installed", "python tools/envs.py build impi")
    script = tmp_path / "script.py"
    script.write_text(WHO)
    done = subprocess.run(
        [str(directory / "bin" / "mpiexec"), "-n", str(RANKS), sys.executable, str(script)],
        env=rank_environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = [f"mpich gloo {(rank, RANKS, rank, RANKS, 1)} 6" for rank in range(RANKS)]
    assert sorted(done.stdout.splitlines()) == wanted

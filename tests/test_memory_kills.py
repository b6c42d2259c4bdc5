"""Ranks that are killed at random moments: the others soon learn which, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from worlds import rank_environment

#: The number of worlds in which a rank is killed; `make kills` runs more.
KILLS = os.environ.get("ASYNCCOLL_TEST_KILLS", "5")
SEED = os.environ.get("ASYNCCOLL_TEST_SEED", "1")


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_are_killed_at_random_moments() -> None:
    """Ranks die while lanes are opened, and amid calls of one step and of many."""
    tool = Path(__file__).with_name("kills.py")
    ended = subprocess.run(
        [sys.executable, str(tool), KILLS, SEED],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=patient(10 * int(KILLS)),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr

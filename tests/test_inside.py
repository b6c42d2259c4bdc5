"""The programs of docs/inside.md run as printed, in the environment that has these libraries."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import DOCS, blocks
from patience import patient
from worlds import rank_environment

PROGRAMS = {block.heading: block.code for block in blocks(DOCS / "inside.md", "python")}
#: The libraries that a program imports, and whether one of our launchers starts it.
NEEDS = {
    "accelerate": ("accelerate", True),
    "Fabric": ("lightning", False),
    "Lightning": ("lightning", False),
    "Ray Train": ("ray", False),
    "Ray actors": ("ray", False),
}


def test_every_program_is_known() -> None:
    assert PROGRAMS.keys() == NEEDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("title", NEEDS)
def test_the_program_runs(title: str, tmp_path: Path) -> None:
    package, launched = NEEDS[title]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"`make inside` runs it where there is {package}")
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[title])
    launcher = ["-m", "asynccoll", "run", "-n", "2"] if launched else []
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        cwd=tmp_path,
        env=rank_environment(),
        timeout=patient(180),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\.\d\d on 2 ranks", done.stdout), done.stdout + done.stderr
    assert "Traceback" not in done.stderr

#!/usr/bin/env python3
"""Measure the coverage of asynccoll over all ranks, threads, backends and simulated worlds of the tests.

    python tools/covered.py run COMMAND...   run it, and measure every Python process that it starts
    python tools/covered.py report           merge the data of all runs, print it by package, check the bounds
    python tools/covered.py clean            delete the data of earlier runs

Each process writes its own file in ``build/coverage``. ``pyproject.toml`` (``[tool.coverage]``) lists what is
measured and what is excluded, with reasons.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import envbuild
from envbuild import ROOT, Environment

ENVIRONMENT = Environment("coverage", groups=("coverage",), download="0.3 MB", constraints="coverage.txt")
DATA = ROOT / "build" / "coverage"
#: `report` fails below these percentages of the code that needs no GPU or TPU.
LINES, BRANCHES = 97.0, 92.0


def _coverage() -> tuple[Path, Path]:
    """Return the interpreter for which coverage is installed, and the directory to import it from."""
    python = envbuild.ensure(ENVIRONMENT)
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    return python, packages


def run(command: list[str]) -> int:
    """Run ``command`` so that each Python process that it starts writes its coverage into ``DATA``."""
    _, packages = _coverage()
    DATA.mkdir(parents=True, exist_ok=True)
    # envs.py, which the make targets use, sets PYTHONPATH and appends this to it.
    measuring = os.pathsep.join([str(ROOT / "tools" / "measuring"), str(packages)])
    variables = {
        "ASYNCCOLL_MEASURING": measuring,
        "COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"),
        "COVERAGE_FILE": str(DATA / "of"),
    }
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


def _in_percent(summary: dict[str, int]) -> tuple[float, float]:
    """Return the percentages of covered lines and branches; 100 if there are none."""
    lines = 100 * summary["covered_lines"] / (summary["num_statements"] or 1)
    branches = 100 * summary["covered_branches"] / (summary["num_branches"] or 1)
    return (lines if summary["num_statements"] else 100.0), (branches if summary["num_branches"] else 100.0)


def report() -> int:
    """Print a row per package and per file below the bounds. Returns 1 if the total is below them."""
    python, _ = _coverage()
    tool = [str(python), "-m", "coverage"]
    where = os.environ | {"COVERAGE_FILE": str(DATA / "merged")}
    config = ["--rcfile", str(ROOT / "pyproject.toml")]
    parts = [str(file) for file in DATA.glob("of.*")]
    subprocess.run([*tool, "combine", *config, "--keep", "-q", *parts], cwd=ROOT, env=where, check=True)
    found = DATA / "found.json"
    subprocess.run([*tool, "json", *config, "-q", "-o", str(found)], cwd=ROOT, env=where, check=True)
    data = json.loads(found.read_text())
    packages: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, file in data["files"].items():
        for key, value in file["summary"].items():
            if isinstance(value, int):
                packages[Path(name).parts[1]][key] += value
    for name, summary in sorted(packages.items()):
        print("{:24}{:8.1f}{:8.1f}".format(name, *_in_percent(summary)))
    for name, file in sorted(data["files"].items()):
        lines, branches = _in_percent(file["summary"])
        if lines < LINES or branches < BRANCHES:
            missing = ", ".join(map(str, file["missing_lines"]))
            print(f"  {name}: lines {lines:.1f}, branches {branches:.1f}; not reached: {missing}")
    lines, branches = _in_percent(data["totals"])
    print(f"coverage: {lines:.1f} % of lines, {branches:.1f} % of branches (bounds: {LINES}, {BRANCHES})")
    return int(lines < LINES or branches < BRANCHES)


def main(argv: list[str]) -> int:
    match argv:
        case ["run", *command] if command:
            return run(command)
        case ["report"]:
            return report()
        case ["clean"]:
            shutil.rmtree(DATA, ignore_errors=True)
            return 0
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

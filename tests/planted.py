"""Plants one mistake after the other into a copy of the library, and tells how soon simulated worlds find it.

``python tests/planted.py SECONDS [COUNT [SEED]]``: so long for each; those that were thought of, or ``COUNT``
mechanical ones. ``JOBS`` at a time. What is not found is to be argued, or to be drawn by programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mistakes import LIBRARY, SEEDED, Mistake, mechanical

HERE = Path(__file__).parent


def found(mistake: Mistake, seconds: float) -> str:
    """What the exploration of a library that has it says."""
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "asynccoll"
        shutil.copytree(LIBRARY, copied, ignore=shutil.ignore_patterns("__pycache__"))
        (copied / mistake.file).write_text(mistake.text)
        told = [_looked(directory, seconds / 2, statements) for statements in ("", _module(mistake.file))]
    return next((one for one in told if not one.startswith("not found")), told[-1])


def _module(file: str) -> str:
    return f"asynccoll.{file.removesuffix('.py').replace('/', '.')}"


def _looked(directory: str, seconds: float, statements: str) -> str:
    """Within these seconds, with points before statements or without."""
    search = os.pathsep.join([directory, str(HERE)])
    environ = os.environ | {"PYTHONPATH": search, "REDUCING": "0", "SEED": "1", "JOBS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "explore_simulated.py"), str(seconds), "2,3"],
            env=environ | {"STATEMENTS": statements},
            capture_output=True,
            text=True,
            check=False,
            timeout=10 * seconds + 120,
        )
    except subprocess.TimeoutExpired:
        return "stuck"
    if done.returncode not in (0, 1) or "schedules of" not in done.stdout:
        return f"crash: {done.stderr.strip().splitlines()[-1:]}"
    at = re.search(r"^=== (.*)$", done.stdout, re.MULTILINE)
    return at[1] if at else f"not found: {done.stdout.splitlines()[-2]}"


def main() -> int:
    """Plant them all; fails if less than 95 % are found."""
    seconds, *drawn = sys.argv[1:]
    planted = mechanical(*map(int, [*drawn, "1"][:2])) if drawn else SEEDED()
    missed = 0
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "1"))) as pool:
        for mistake, told in zip(
            planted, pool.map(lambda one: found(one, float(seconds)), planted), strict=True
        ):
            missed += told.startswith("not found")
            print(f"{mistake.file}, {mistake.what:.160}: {told}", flush=True)
    print(f"{len(planted) - missed} of {len(planted)} were found")
    return 1 if missed > 0.05 * len(planted) else 0


if __name__ == "__main__":
    sys.exit(main())

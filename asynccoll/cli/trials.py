"""Tries whether each backend works here: by a world of one in its own process, several at the same time.

An installed package says little: libraries may be missing, or built for another torch. A backend that does
not work is reported with its error and with the line to type.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from asynccoll.backends import table

_LIMIT_S = 60.0
_PROGRAM = """
import sys, asynccoll as ac
ac.initialize(sys.argv[1])
assert ac.all_reduce(2).wait() == 2
ac.finalize()
"""
#: Variables of launchers, which are about this process and not about the world of one that is tried.
_OF_LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI|PMIX|MPI_|HOROVOD_|ASYNCCOLL_)"
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One backend: whether it works, and if not why, and what to type."""

    works: bool
    why: str = ""
    do: str = ""


def look() -> dict[str, Trial]:
    """Return for every backend whether its parts are there, without trying it."""
    return {name: _lacks(need) if need else Trial(works=True) for name, need in table.needs().items()}


def _lacks(need: str) -> Trial:
    what, _, line = need.partition(": ")
    return Trial(works=False, why=f"it needs {what}", do=line)


def try_all() -> dict[str, Trial]:
    """Try every backend; return the results by name."""
    needs = table.needs()
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = pool.map(lambda name: _try(name, needs[name]), needs)
        return dict(zip(needs, found, strict=True))


def _try(name: str, need: str) -> Trial:
    if need:
        return _lacks(need)
    environ = {key: value for key, value in os.environ.items() if not _OF_LAUNCHERS.match(key)}
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", _PROGRAM, name],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"a world of one did not finish within {_LIMIT_S:.0f} s (on a busy machine, try again)"
        return Trial(works=False, why=why)
    if done.returncode == 0:
        return Trial(works=True)
    return Trial(works=False, why=_said(done), do=_line_of(done.stderr))


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error in one line."""
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"a world of one was killed by signal {-done.returncode}"
    return lines[-1] if lines else f"a world of one ended with exit code {done.returncode}"


def _line_of(errors: str) -> str:
    """Return the line that our own errors say to type."""
    found = re.search(r"pip install [^\n;)]+", errors)
    return found[0].strip() if found else ""

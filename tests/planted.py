"""Plants one mistake after the other into a copy of the library, and tells how soon simulated worlds find it.

``python tests/planted.py SECONDS [WORD]``: so long for each mistake (whose file or text contains the word). A
mistake is a line of the library that is replaced; it must be there exactly once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import asynccoll


class Mistake(NamedTuple):
    """What is replaced by what, in which file."""

    file: str
    right: str
    wrong: str


MISTAKES = (
    Mistake("order/lane.py", "            and not self._queue\n", ""),
    Mistake(
        "order/lane.py", "            and self._active is None\n            and not", "            and not"
    ),
    Mistake("order/lane.py", "            and self._cut is None\n            and not", "            and not"),
    Mistake("order/lane.py", "            self.epoch += 1\n", ""),
    Mistake("order/lane.py", "or epoch != self.epoch or", "or"),
    Mistake("order/lane.py", "        cut.hold(*above)\n", "        cut.hold()\n"),
    Mistake(
        "order/lane.py",
        "            begun = self._replay(cut, verdict.resumes)\n",
        "            begun = None\n",
    ),
    Mistake("order/lane.py", "self.sequence = place = self.sequence + 1", "place = self.sequence + 1"),
    Mistake("order/lane.py", "max(self.sequence if first is None else", "max(0 if first is None else"),
    Mistake("transport/completion.py", "            self._event.set()\n", "            pass\n"),
    Mistake(
        "transport/completion.py",
        "        for callback in callbacks:\n",
        "        for callback in callbacks[:1]:\n",
    ),
    Mistake(
        "waiting/loops.py",
        "                loop.call_soon_threadsafe(_resolve, future)\n",
        "                pass\n",
    ),
    Mistake("waiting/loops.py", "                token.run_sync_soon(resume)\n", "                pass\n"),
    Mistake("health/watchdog.py", "            self._wake.notify()\n", "            pass\n"),
)


def planted(mistake: Mistake, into: Path) -> None:
    """A copy of the library that has it."""
    shutil.copytree(
        Path(asynccoll.__file__).parent, into / "asynccoll", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = into / "asynccoll" / mistake.file
    text = path.read_text()
    count = text.count(mistake.right)
    if count < 1:
        raise SystemExit(f"{mistake.file} has not {mistake.right!r}")
    path.write_text(text.replace(mistake.right, mistake.wrong, 1))


def found(mistake: Mistake, seconds: float) -> str:
    """What the exploration of such a library says."""
    with tempfile.TemporaryDirectory() as directory:
        planted(mistake, Path(directory))
        search = os.pathsep.join([directory, str(Path(__file__).parent)])
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("explore_simulated.py")), str(seconds), "2,3"],
            env=os.environ | {"PYTHONPATH": search, "REDUCING": "0", "SEED": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1):
        return done.stderr[-2000:]
    at = re.search(r"^=== (.*)$", done.stdout, re.MULTILINE)
    return at[1] if at else f"not found: {done.stdout.splitlines()[-2]}"


def main() -> int:
    """Plant them all; fails if one is not found."""
    seconds, *words = sys.argv[1:]
    missed = 0
    for mistake in MISTAKES:
        if all(word in f"{mistake}" for word in words):
            told = found(mistake, float(seconds))
            missed += not told.startswith("program")
            print(
                f"{mistake.file}: {mistake.right.strip()!r} -> {mistake.wrong.strip()!r}: {told}", flush=True
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

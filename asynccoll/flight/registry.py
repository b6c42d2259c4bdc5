"""The directory in which a launcher, and tools outside of a job, find the job's ranks.

A launcher makes a directory that only its user can read, and passes its name to the ranks. Each rank writes a
note there once it has joined its world: process, memory, address. A note may be that of a rank that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

#: The environment variable that names the directory.
VARIABLE = "ASYNCCOLL_JOB_DIRECTORY"
_PREFIX, _SUFFIX = "rank-", ".json"


def register(directory: str, rank: int, told: Mapping[str, object]) -> None:
    """Write the note of ``rank``; do nothing if ``directory`` is "" or is gone."""
    if not directory:
        return
    note = Path(directory, f"{_PREFIX}{rank}{_SUFFIX}")
    unfinished = note.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps(told))
        unfinished.replace(note)


def registered(directory: Path) -> dict[int, dict[str, object]]:
    """Return the notes in ``directory``, by rank; other files are ignored."""
    found: dict[int, dict[str, object]] = {}
    for note in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(note.read_text())
            if isinstance(told, dict) and "calls" not in told:  # dumps have the same names
                found[int(note.name[len(_PREFIX) : -len(_SUFFIX)])] = told
    return dict(sorted(found.items()))

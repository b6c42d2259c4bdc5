"""Dumps: what ranks had recorded when something failed, in files that can be read without the ranks.

    /tmp/asynccoll-UID/JOB/rank-0.json    one for each rank of this host that was seen

A job has one directory, on whose name all its ranks agree; a later failure overwrites the dumps of an earlier
one. Each user's latest jobs are kept. Write errors are ignored: a full disk must not hide the failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.flight.reading import Flight, from_plain, to_plain

#: The environment variable for the parent of the jobs' directories; ``off`` writes nothing.
VARIABLE = "ASYNCCOLL_DUMPS"
_MOST_JOBS = 20
_JOB = re.compile("[0-9a-f]{12}")
_PREFIX, _SUFFIX = "rank-", ".json"
#: The key for the wall clock time at which a dump was written.
_WRITTEN = "written"


class Dumps(NamedTuple):
    """What ranks had recorded, by rank, and when it was written, by each one's own monotonic clock."""

    flights: dict[int, Flight]
    now: dict[int, float]


def directory_for(job: str) -> Path | None:
    """Return the directory of the job named ``job``; None if nothing should be written, or nothing can."""
    said = os.environ.get(VARIABLE, "")
    if said == "off":
        return None
    try:
        parent = Path(said) if said else Path(tempfile.gettempdir(), f"asynccoll-{os.getuid()}")
    except OSError:  # gettempdir tries to write: the disk is full, or no descriptors are left
        return None
    return parent / hashlib.blake2b(job.encode(), digest_size=6).hexdigest()  # matches _JOB


def write_dumps(directory: Path, flights: Mapping[int, Flight]) -> bool:
    """Write what each rank has recorded; return whether all of it was written."""
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.parent.stat().st_uid != os.getuid():
            return False  # it is another user's, who could read the dumps, or redirect them elsewhere
        directory.mkdir(mode=0o700, exist_ok=True)
        for rank, flight in flights.items():
            plain = to_plain(flight)
            plain[_WRITTEN] = host.wall_clock()
            plain["said"] = {key: value for key, value in flight.said.items() if key != "secret"}
            unfinished = directory / f"{_PREFIX}{rank}.{os.getpid()}"
            unfinished.write_text(json.dumps(plain))
            unfinished.replace(directory / f"{_PREFIX}{rank}{_SUFFIX}")
    except OSError:
        return False
    _forget_old(directory.parent)
    return True


def _forget_old(parent: Path) -> None:
    """Delete the directories of all but the latest jobs; other ranks may be doing the same."""
    with contextlib.suppress(OSError):
        jobs = sorted(filter(_is_of_a_job, parent.iterdir()), key=lambda one: one.stat().st_mtime)
        for old in jobs[:-_MOST_JOBS]:
            shutil.rmtree(old, ignore_errors=True)


def _is_of_a_job(path: Path) -> bool:
    """Whether this is a directory of dumps, not something else that the user keeps in the same place."""
    return (
        _JOB.fullmatch(path.name) is not None
        and path.is_dir()
        and all(one.name.startswith(_PREFIX) for one in path.iterdir())
    )


def read_dumps(directory: Path) -> Dumps:
    """Read the dumps in ``directory``.

    Raises:
        InvalidArgumentError: there is no readable dump.
    """
    found: dict[int, Flight] = {}
    now: dict[int, float] = {}
    for file in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        # A file of that name may be something else, with any JSON value in it.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            plain = json.loads(file.read_text())
            written = plain.pop(_WRITTEN, 0.0)
            flight = from_plain(plain)
            now[flight.rank] = written - flight.wall + flight.began
            found[flight.rank] = flight
    if not found:
        raise InvalidArgumentError(
            f"there is no dump in {str(directory)!r}: expected files {_PREFIX}*{_SUFFIX}; an error names "
            "their directory"
        )
    return Dumps(dict(sorted(found.items())), now)

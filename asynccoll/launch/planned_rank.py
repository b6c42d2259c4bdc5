"""The program of one rank, started by mpiexec (``planned_rank.py PLAN``) or ``horovod.run`` for ``spawn``.

The plan holds two pickles: how to prepare this interpreter, as multiprocessing does it, and the job.
This file is started by its path, and imports the standard library only until the parent's import path is in
place.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from multiprocessing import spawn as preparing
from pathlib import Path


def main(plan: bytes) -> None:
    """Carry out the job; an error goes into the job's records, and the exit code tells the launcher."""
    pickles = io.BytesIO(plan)
    preparing.prepare(pickle.load(pickles))  # noqa: S301 - written by the process that started us
    from asynccoll.launch import child

    child.die_with_launcher()
    child.forget_launcher()
    rank, local_rank = _place()
    task = pickle.load(pickles)  # noqa: S301
    try:
        task.carry_out(rank, local_rank)
    except BaseException:  # recorded
        child.abort_mpi(1)
        sys.exit(1)


def _place() -> tuple[int, int]:
    """Return rank and local rank, as the launcher says."""
    from asynccoll.environment.detection import detect

    info = detect(os.environ)
    return info.rank, info.local_rank


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_bytes())

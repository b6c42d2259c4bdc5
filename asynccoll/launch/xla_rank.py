"""The program that ``spawn`` starts for the ranks of xla-tpu: ``python xla_rank.py PLAN``.

On the CPU all ranks are threads of this one process, since several processes would each be a world of
one. On TPU torch_xla starts a process for each chip. The plan is as in ``planned_rank.py``.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from multiprocessing import spawn as preparing
from pathlib import Path
from typing import Any


def main(plan: str) -> None:
    """Carry out the job on every device; errors go into the job's records."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the main thread waits for replicas that it cannot stop
    _load(plan)
    if os.environ["PJRT_DEVICE"].startswith("TPU"):
        import torch_xla

        torch_xla.launch(_tpu_rank, (plan,))
    else:
        from asynccoll.backends.xla.threads import run_replicas

        run_replicas(lambda rank: _replica(plan, rank))


def _load(plan: str) -> Any:
    """Return the job, in an interpreter that is made to look like the one that wrote it."""
    with Path(plan).open("rb") as file:
        preparing.prepare(pickle.load(file))  # noqa: S301 - written by the process that started us
        from asynccoll.launch import child

        child.die_with_launcher()
        return pickle.load(file)  # noqa: S301


def _replica(plan: str, rank: int) -> None:
    """One rank in a thread of this process, which cannot be stopped if another one fails."""
    from asynccoll.host.exits import EXIT_SECONDS

    # Each rank unpickles arguments of its own: threads must not share what a process would not.
    with Path(plan).open("rb") as file:
        pickle.load(file)  # noqa: S301
        task = pickle.load(file)  # noqa: S301
    try:
        _carry_out(task, rank, rank, rank=rank)
    except BaseException:
        end = threading.Timer(EXIT_SECONDS, _end)
        end.daemon = True
        end.start()
        raise


def _end() -> None:
    """End the process, even if other replicas still wait for something."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _tpu_rank(rank: int, plan: str) -> None:
    """One rank in a process that torch_xla started."""
    import torch_xla.runtime as xr

    _carry_out(_load(plan), rank, xr.local_ordinal())


def _carry_out(task: Any, rank: int, local_rank: int, /, **place: object) -> None:
    """Carry out the job, which records its error."""
    try:
        task.carry_out(rank, local_rank, **place)
    except BaseException:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])

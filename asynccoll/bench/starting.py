"""Which ranks measure: those that a launcher has started, else as many as are asked for, on this host.

Our own ranks are started by mpiexec if mpi4py is to be measured, since it needs that; else as ``asynccoll
run`` does it. Their results come through a pipe, so that the table and its progress bar belong to the process
that the terminal sees.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import tempfile
import threading
from pathlib import Path

from asynccoll.backends.table import starting
from asynccoll.bench.request import BenchRequest, Report
from asynccoll.environment.detection import detect_here
from asynccoll.errors import BackendNotFoundError
from asynccoll.launch import mpiexec
from asynccoll.launch.engines import run
from asynccoll.launch.request import RunRequest


def bench(request: BenchRequest, report: Report, *, ranks: int) -> int:
    """Measure what ``request`` asks for; returns the exit code. ``report`` is called in this process.

    Under a launcher (mpiexec, srun, torchrun) this process is one of the ranks, and only rank 0 reports;
    ``ranks`` then has no effect.
    """
    if detect_here().world_size > 1:
        from asynccoll.bench.ranks import measure

        measure(request, report)
        return 0
    with tempfile.TemporaryDirectory(prefix="asynccoll-bench-") as directory:
        pipe = Path(directory, "events")
        os.mkfifo(pipe)
        listener = _Listener(pipe, report)
        try:
            return run(
                RunRequest(
                    "asynccoll.bench.ranks",
                    (request.to_json(), str(pipe)),
                    module=True,
                    backend=request.backend,
                    options={"--nproc-per-node": str(ranks)},
                    engine="mpiexec" if _wants_mpiexec(request) else None,
                )
            )
        finally:
            listener.end()


def _wants_mpiexec(request: BenchRequest) -> bool:
    """Whether mpi4py can take part, which needs ranks that mpiexec started."""
    if request.peers and "mpi4py" not in request.peers:
        return False
    if starting(request.backend or "") != "processes" or importlib.util.find_spec("mpi4py") is None:
        return False
    try:
        mpiexec.find()
    except BackendNotFoundError:
        return False
    return True


class _Listener:
    """Reads what rank 0 writes, in a thread, and reports it.

    If a report fails, for instance because our output is closed, it stops the ranks and keeps reading: rank 0
    would otherwise wait for room in the pipe, and the others for rank 0.
    """

    def __init__(self, pipe: Path, report: Report) -> None:
        # Opened for reading and writing: neither side waits for the other, and ``end`` writes the last line.
        self._descriptor = os.open(pipe, os.O_RDWR)
        self._report = report
        self._failed: BaseException | None = None
        self._running = True
        self._thread = threading.Thread(target=self._read, name="asynccoll bench", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with os.fdopen(os.dup(self._descriptor)) as lines:
            for line in lines:
                kind, what = json.loads(line)
                if kind == "end":
                    return
                if self._failed is None:
                    self._tell(kind, what)

    def _tell(self, kind: str, what: dict[str, object]) -> None:
        try:
            self._report(kind, what)
        except BaseException as error:  # raised by end(), in the thread that called bench
            self._failed = error
            if self._running:  # the main thread waits for the launcher, and handles signals
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self) -> None:
        """Wait until everything that was written is reported.

        Raises:
            BaseException: what a report raised.
        """
        self._running = False
        os.write(self._descriptor, b'["end", {}]\n')
        self._thread.join()
        os.close(self._descriptor)
        if self._failed is not None:
            raise self._failed

"""The engine under ``asynccoll run --backend mpi`` and ``horovod``: a launcher on this host.

mpiexec and horovodrun start the ranks, pass their output on and end them all when one has failed. This
module adds a runner that records tracebacks, a report that shows the first failure once, and a shutdown
without leftovers. What they do differently from torchrun (several hosts, restarts, redirection) is refused,
with the advice to call them directly.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asynccoll.errors import InvalidArgumentError
from asynccoll.flight import Flight
from asynccoll.host.cores import usable_cores
from asynccoll.launch import child, horovodrun, mpiexec, passing, processes
from asynccoll.launch.horovodrun import Horovodrun
from asynccoll.launch.mpiexec import Mpiexec
from asynccoll.launch.ranks import naming, number_of_ranks, without_place
from asynccoll.launch.report import (
    Failure,
    exit_code,
    first_failure,
    last_call,
    read_failure,
    report,
    what_aborted,
)
from asynccoll.launch.request import RunRequest
from asynccoll.launch.witness import Witness

#: The options that apply here; torchrun's others are about torch elastic.
_TAKEN = {"--nproc-per-node", "--nnodes", "--standalone", "--no-python"}


@dataclass(frozen=True, slots=True)
class _Engine:
    """What differs between the launchers."""

    backend: str
    name: str
    find: Callable[[], Mpiexec | Horovodrun]
    several_hosts: str


#: By how ``backends.table`` says that a backend's ranks are started.
_ENGINES = {
    "mpiexec": _Engine("mpi", "mpiexec", mpiexec.find, "mpiexec -n 4 --hostfile hosts"),
    "horovod": _Engine("horovod", "horovodrun", horovodrun.find, "horovodrun -np 4 -H host1:2,host2:2"),
}


def run(request: RunRequest, how: str) -> int:
    """Start the ranks with mpiexec or horovodrun, wait for them, and return the exit code."""
    engine = _ENGINES[how]
    options = {**_of_variables(os.environ), **request.options}
    _refuse(options, engine)
    ranks = number_of_ranks(options.get("--nproc-per-node", "1"))
    launcher = engine.find()
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="asynccoll-run-", ignore_cleanup_errors=True) as errors:
        environ = launcher.environment(_environment(request.backend or engine.backend, ranks, errors))
        line = launcher.command(ranks, _program(request))
        stopped: list[signal.Signals] = []
        witness = Witness(Path(errors)).watch()
        with passing.launched(line, environ) as running:

            def stop(number: signal.Signals) -> None:
                if running.returncode is None:  # else the job has ended by itself
                    stopped.append(number)
                    passing.pass_on(number, running)

            passing.on_stop_signals(stop)
            code = running.wait()
        first = witness.ended()
        processes.kill_children()
        return _ended(code, stopped, Path(errors), ranks, first, engine.name, witness.flights())


def _of_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the numbers of ranks and hosts that torchrun's variables give, as options."""
    names = {name: f"PET_{name[2:].upper().replace('-', '_')}" for name in ("--nproc-per-node", "--nnodes")}
    return {option: environ[name] for option, name in names.items() if environ.get(name)}


def _refuse(options: Mapping[str, str | bool], engine: _Engine) -> None:
    refused = sorted(name for name in options if name not in _TAKEN)
    if refused or str(options.get("--nnodes", "1")) not in ("1", "1:1"):
        what = ", ".join(refused) if refused else f"--nnodes (PET_NNODES) {options['--nnodes']}"
        raise InvalidArgumentError(
            f"`asynccoll run --backend {engine.backend}` starts ranks with {engine.name} on this host "
            f"and does not support {what}; for more, call it yourself: `{engine.several_hosts} python "
            "script.py`"
        )


def _environment(backend: str, ranks: int, errors: str) -> dict[str, str]:
    """Return what the ranks inherit; whatever the user has set is kept."""
    return {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        **without_place(os.environ),
        "ASYNCCOLL_BACKEND": backend,
        **naming(errors),
    }


def _program(request: RunRequest) -> list[str]:
    if "--no-python" in request.options:
        return [request.program, *request.arguments]
    kind = "module" if request.module else "script"
    return [sys.executable, child.__file__, kind, request.program, *request.arguments]


def _ended(
    code: int,
    stopped: list[signal.Signals],
    errors: Path,
    ranks: int,
    first: list[int],
    launcher: str,
    flights: Mapping[int, Flight],
) -> int:
    """Report how the job ended; returns the exit code of ``asynccoll run``."""
    if stopped:
        return passing.say_stopped(stopped[0])
    if code:
        failures = [one for rank in range(ranks) if (one := _failure(errors, rank)) is not None]
        said = report(failures) if failures else _unrecorded(code, errors, first, launcher, flights)
        print(said, file=sys.stderr, flush=True)
        if meant := what_aborted(code, flights):
            print(f"asynccoll run: {meant}", file=sys.stderr, flush=True)
        cause = first_failure(failures) if failures else None
        if cause is not None and not cause.lost and not cause.left:
            return exit_code(cause)  # the launcher's may be that of a rank that failed because of this one
    return code if code >= 0 else 128 - code


def _unrecorded(
    code: int, errors: Path, first: list[int], launcher: str, flights: Mapping[int, Flight]
) -> str:
    """Return what to say if no rank recorded an error: which was the first to end."""
    text = f"asynccoll run: {launcher} ended with code {code}, and no rank recorded an error"
    if not first:
        return f"{text}; the output of {launcher} is above"
    pid = _read(errors / f"{first[0]}.pid")
    who = f"{text}: rank {first[0]} on {socket.gethostname()} (pid {pid}) was killed, or ended first"
    return "; ".join(filter(None, (who, last_call(first[0], flights))))


def _failure(errors: Path, rank: int) -> Failure | None:
    recorded = child.read_record(errors / f"{rank}.json")
    if recorded is None:
        return None
    pid = int(_read(errors / f"{rank}.pid") or 0)
    return read_failure(rank, pid, None, socket.gethostname(), recorded, "")


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""

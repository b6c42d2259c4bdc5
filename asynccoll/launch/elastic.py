"""The engine under ``asynccoll run``: torch elastic, on the loopback address if the job has one host.

torchrun's own parser and agent do the work, so flags and ``PET_*`` variables mean what they mean
there. This module adds a rendezvous that listens on loopback, a runner that records tracebacks of scripts
that are not decorated, a report that shows the first failure once, and a shutdown without leftovers.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from asynccoll.backends.api.tcpstore import await_name, await_server
from asynccoll.environment.info import LAST_PORT
from asynccoll.errors import AsyncCollError, InvalidArgumentError
from asynccoll.host.cores import usable_cores
from asynccoll.launch import child, loopback, passing, processes
from asynccoll.launch.ranks import naming, number_of_ranks
from asynccoll.launch.report import Failure, exit_code, first_failure, read_failure, report
from asynccoll.launch.request import RunRequest
from asynccoll.launch.witness import Witness

#: Options that torchrun lacks or means differently: with --no-python our runner becomes the program, so that
#: it dies with us.
_OURS = ("--no-python", "--kill-on-bad-exit")
#: torchrun's default for --master-port.
_PORT = 29500
#: What torch is to handle, since it insists on a signal: all those that stop a job have handlers of ours.
_SPARE_SIGNAL = "SIGRTMAX"
#: torch's default for how long a host waits for the others, --rdzv-conf join_timeout.
_JOIN_SECONDS = 600


def run(request: RunRequest) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.usage = "asynccoll run", "asynccoll run [options] script.py [args ...]"
    given = parser.parse_args(_torchrun_arguments(request))
    _silence_torch()
    with _log_directory(given), passing.temporary("asynccoll-job-") as job:
        try:
            _check_numbers(given)
            _check_meeting(given, request.options)
            _set_environment(given, request.backend, job)
            config, command, arguments = _configure(given)
            goes_on = request.options.get("--kill-on-bad-exit") == "0"
            witness = Witness(job, bool if goes_on else processes.continue_stopped).watch()
            try:
                return _launch(config, command, arguments, witness)
            finally:
                witness.ended()
        except AsyncCollError:
            raise
        except (AssertionError, ValueError) as error:  # how torchrun refuses values
            raise InvalidArgumentError(f"{error}; see `asynccoll run --help`") from error


def _launch(config: LaunchConfig, command: str, arguments: list[str], witness: Witness) -> int:
    """Run the job; returns its exit code."""
    processes.adopt_orphans()
    ended = threading.Event()
    passing.on_stop_signals(
        lambda number: None if ended.is_set() else _raise_stop(number),
        stuck=passing.give_up,
    )
    assert config.logs_specs is not None, "torchrun always has some"
    error_files = _at_each_attempt(config.logs_specs, witness)
    try:
        try:
            _await_first_host(config)
            elastic_launch(config, command)(*arguments)
        finally:
            ended.set()  # a signal must not cut the report, or the end of this process, short
    except ChildFailedError as error:
        processes.kill_children()  # first: once the failure is reported, the next job may start
        failures = [_failure(rank, one, error_files[one.local_rank]) for rank, one in error.failures.items()]
        print(report(failures, flights=witness.flights()), file=sys.stderr, flush=True)
        return exit_code(first_failure(failures))
    except _StopError as stop:
        processes.kill_children()
        return passing.say_stopped(stop.number)
    except RendezvousTimeoutError:
        return _say_others_missing(config)
    except (DistNetworkError, DistStoreError, RendezvousConnectionError, _UnreachableError) as error:
        cause = error.__cause__ if isinstance(error, RendezvousConnectionError) else error
        raise InvalidArgumentError(
            f"the hosts cannot meet at {config.rdzv_endpoint}: {str(cause).splitlines()[0]}; choose another "
            "address or port (--master-addr, --master-port or --rdzv-endpoint), the same on all hosts"
        ) from error
    return 0


class _UnreachableError(Exception):
    """The address where the hosts should meet cannot be reached."""


def _await_first_host(config: LaunchConfig) -> None:
    """Wait until this host can reach the first one, if hosts are given numbers (static rendezvous).

    torch would wait in native code, where signals are not handled, and log twenty lines for each attempt.
    """
    if config.rdzv_backend != "static":
        return
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_PORT)
    try:
        if config.rdzv_configs["rank"] == 0:
            await_name(host)
        else:
            await_server(host, port, float(config.rdzv_configs["timeout"]))
    except OSError as error:
        raise _UnreachableError(error.strerror or str(error)) from error


def _say_others_missing(config: LaunchConfig) -> int:
    fewest, most = config.min_nodes, config.max_nodes
    hosts = f"{fewest} hosts" if fewest == most else f"{fewest} to {most} hosts"
    seconds = config.rdzv_configs.get("join_timeout", _JOIN_SECONDS)
    print(
        f"asynccoll run: {socket.gethostname()} waited {seconds} s at {config.rdzv_endpoint} for a job of"
        f" {hosts} that did not start; check that all of them have run `asynccoll run`, with the"
        " same --rdzv-endpoint, --rdzv-id and --nnodes, and reach that address (--rdzv-conf"
        " join_timeout=SECONDS waits longer)",
        file=sys.stderr,
        flush=True,
    )
    return 1


class _StopError(SignalException):
    """The signal that stops the job; torch elastic sends its ``sigval`` to the ranks."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"got {number.name}", sigval=passing.for_ranks(number))
        self.number = number


def _raise_stop(number: signal.Signals) -> None:
    raise _StopError(number)


def _torchrun_arguments(request: RunRequest) -> list[str]:
    """Return the command line for torchrun: its own options, then our runner around the program."""
    flags: list[str] = []
    for name, value in request.options.items():
        if name not in _OURS:
            flags += [name] if value is True else [f"{name}={value}"]
    return [*flags, *_runner(request.options), *_kind_and_program(request), *request.arguments]


def _runner(options: Mapping[str, str | bool]) -> list[str]:
    """Return what torch elastic starts as a rank."""
    match options.get("--kill-on-bad-exit", "1"):
        case "0":
            return [str(Path(child.__file__).with_name("keeper.py")), child.__file__]
        case "1":
            return [child.__file__]
        case other:
            raise InvalidArgumentError(
                f"--kill-on-bad-exit {other}: expected 0 (ranks go on when another fails) or 1 (they end)"
            )


def _kind_and_program(request: RunRequest) -> tuple[str, str]:
    """Return what our runner is told to run."""
    if request.options.get("--no-python"):
        found = shutil.which(request.program)
        if found is None:
            raise InvalidArgumentError(f"--no-python: there is no program {request.program!r} to run")
        return "program", found
    return ("module" if request.module else "script"), request.program


def _configure(given: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """Return torch elastic's configuration, with our rendezvous if there is only one host."""
    if _on_loopback(given):
        loopback.register()
        given.standalone = False
        given.rdzv_backend = loopback.NAME
        given.rdzv_endpoint = f"{loopback.ADDRESS}:{given.master_port or 0}"
        given.rdzv_id = uuid.uuid4().hex
    if given.master_port is None:
        given.master_port = _PORT
    given.signals_to_handle = _SPARE_SIGNAL
    config, command, arguments = torchrun.config_from_args(given)
    assert isinstance(command, str), "--run-path is not offered"
    arguments.remove("-u")  # it would write lines in pieces; our runner flushes whole lines
    # torch elastic treats arguments as templates; here they are the program's own.
    return config, command, [text.replace("$", "$$") for text in arguments]


def _check_numbers(given: argparse.Namespace) -> None:
    """Refuse numbers that torch elastic would trip over later, without naming the option."""
    number_of_ranks(given.nproc_per_node)
    try:
        first, last = torchrun.parse_min_max_nnodes(given.nnodes)
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"--nnodes {given.nnodes}: expected a number of hosts, or MIN:MAX"
        ) from error
    if first < 1:
        raise InvalidArgumentError(f"--nnodes {given.nnodes}: expected at least one host")
    if given.rdzv_backend == "static" and not given.standalone and not 0 <= given.node_rank < last:
        raise InvalidArgumentError(
            f"--node-rank {given.node_rank}: expected a number from 0 to {last - 1}, as --nnodes is"
            f" {given.nnodes}"
        )
    port = given.master_port
    if port is not None and not 0 <= port <= LAST_PORT:
        raise InvalidArgumentError(f"--master-port {port}: expected a number up to {LAST_PORT}")
    if not 0 < given.monitor_interval < threading.TIMEOUT_MAX:
        raise InvalidArgumentError(
            f"--monitor-interval {given.monitor_interval}: expected a number of seconds above 0"
        )


def _check_meeting(given: argparse.Namespace, options: Mapping[str, str | bool]) -> None:
    """Refuse several hosts that are not told where to meet: each would wait forever for the others."""
    if given.standalone or _one_host(given) or given.rdzv_endpoint or given.rdzv_conf:
        return
    for option, what in (("--master-addr", "HOST"), ("--node-rank", "RANK")):
        if option not in options and f"PET_{option[2:].upper().replace('-', '_')}" not in os.environ:
            raise InvalidArgumentError(
                f"--nnodes {given.nnodes} needs to know where the hosts meet, and {option} {what} is "
                "missing; give all hosts the same --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or the "
                "same --master-addr HOST and each its own --node-rank RANK"
            )


def _one_host(given: argparse.Namespace) -> bool:
    return bool(torchrun.parse_min_max_nnodes(given.nnodes)[1] == 1)


def _on_loopback(given: argparse.Namespace) -> bool:
    """Whether all ranks are on this host and the user did not say where to meet."""
    if given.standalone:
        return True
    said = given.rdzv_endpoint or given.rdzv_backend != "static"
    return _one_host(given) and not said and given.master_addr == loopback.ADDRESS


def _set_environment(given: argparse.Namespace, backend: str | None, job: Path) -> None:
    """Set what the ranks inherit; whatever the user has set is kept."""
    alone = given.standalone or _one_host(given)
    os.environ.update({**naming(job, alone=alone), **child.launching()})
    if backend:
        os.environ["ASYNCCOLL_BACKEND"] = backend
    ranks = number_of_ranks(given.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // max(1, ranks))))
    if not alone:
        # When sharing its own store, torch elastic keeps the address of its first rendezvous and tells no
        # newcomer: a host that joins later would wait for it forever, and all others for that host.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    elif interface := _loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _loopback_interface() -> str | None:
    """Return ``lo``, or what this system calls it."""
    with contextlib.suppress(OSError):
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return None


def _silence_torch() -> None:
    """Silence torch's error logs, since our report says what went wrong; unless a log level is set."""
    if os.environ.get("LOGLEVEL") or os.environ.get("TORCH_LOGS"):
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _log_directory(given: argparse.Namespace) -> Iterator[None]:
    """Have a directory for the ranks' error files: the user's, else a temporary one."""
    if given.log_dir:
        logs = Path(given.log_dir)
        try:
            logs.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=logs):
                pass
        except OSError as error:
            raise InvalidArgumentError(f"--log-dir {logs} cannot be written to: {error.strerror}") from error
        yield
        return
    with passing.temporary("asynccoll-run-") as made:
        given.log_dir = str(made)
        yield


def _at_each_attempt(logs: LogsSpecs, witness: Witness) -> dict[int, str]:
    """End what the previous attempt left running, at each attempt; returns the error files of the latest.

    They are kept by local rank as torch elastic decides on them, before it starts the ranks: a failure names
    its file only if one was written, and the directory for logs may have files of other runs.
    """
    files: dict[int, str] = {}
    decide = logs.reify

    def reify(envs: dict[int, dict[str, str]]) -> LogsDest:
        processes.end_children()
        witness.restarted()
        decided = decide(envs)
        files.update(decided.error_files)
        return decided

    logs.reify = reify  # type: ignore[method-assign]
    return files


def _failure(rank: int, failure: ProcessFailure, error_file: str) -> Failure:
    """Return what is known about how one rank ended."""
    recorded = failure.error_file_data if Path(failure.error_file).is_file() else {}
    crash = _left(error_file, child.CRASH_FILE)
    pid = int(_left(error_file, child.PID_FILE) or failure.pid)
    ended = Path(error_file).with_name(child.ENDED_FILE).exists()
    found = read_failure(rank, pid, failure.exitcode, socket.gethostname(), recorded, crash)
    return replace(found, ended=ended)


def _left(error_file: str, name: str) -> str:
    """Return what a rank has left next to its error file; "" if nothing."""
    with contextlib.suppress(OSError):
        return Path(error_file).with_name(name).read_text(errors="replace")
    return ""

"""Worlds of real ranks on which tests run their cases.

A `World` starts its ranks when it is first used, keeps them for later tests, and replaces them after a hang,
a death or an uncaught error. `STARTERS` says how each backend's ranks are started. To add a backend to the
suite, add one function here (and a row of `ranks.GAPS` for what it cannot do).

Data flows one way: test -> World -> rank program (`ranks.py`) -> result.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import nursery
import starters_horovod
import starters_mpi
import starters_xla
from patience import patient
from ports import free_port

HERE = Path(__file__).parent
START_SECONDS = patient(120)
CLOSE_SECONDS = patient(20)
#: How long the other ranks may continue after one of them has failed.
GRACE_SECONDS = patient(5)

#: The most threads that a rank may have before its world is closed after a test file. gloo has three per
#: group ever opened, and some wake up a hundred times a second.
CROWD = 60


def _words(variable: str, default: str) -> list[str]:
    return os.environ.get(variable, default).split(",")


BACKENDS = _words("ASYNCCOLL_TEST_BACKENDS", "gloo")
WORLD_SIZES = [int(size) for size in _words("ASYNCCOLL_TEST_WORLD_SIZES", "1,2,3,4")]
RUNNERS = _words("ASYNCCOLL_TEST_RUNNERS", "asyncio,trio,blocking")
#: Backends whose ranks are threads of one process.
THREADED = frozenset({"xla-tpu"})
#: Backends whose idle ranks use the processor, and are therefore stopped between tests that use them.
RESTLESS = frozenset({"horovod"})


class RankError(AssertionError):
    """A case failed, hung or died on some rank; the text says which, where and why."""


@dataclass(frozen=True)
class Died:
    """What `World.run` returns for a rank that was expected to die."""

    code: int


@dataclass
class _Process:
    """One rank's process, and what is known about it."""

    rank: int
    popen: subprocess.Popen[bytes]
    directory: Path
    connection: Connection | None = None
    at: str = ""
    failures: list[str] = field(default_factory=list)

    def stderr_tail(self) -> str:
        return self.directory.joinpath(f"stderr-{self.rank}").read_text(errors="replace")[-3000:]

    def stacks(self) -> str:
        """Return the stack of each Python thread of the rank, from faulthandler."""
        path = self.directory / f"stacks-{self.rank}"
        if self.popen.poll() is not None:
            return f"(the process has ended, code {self.popen.returncode})"
        self.popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + patient(3)
        size = -1
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = path.stat().st_size
            if now and now == size:
                break
            size = now
        return path.read_text(errors="replace")[-6000:] or "(no stacks: signal not served)"


# ---------------------------------------------------------------- starting ranks


def rank_environment() -> dict[str, str]:
    """Return the test's environment without a launcher's variables, on loopback with one thread."""
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    paths = [str(HERE), str(HERE.parent / "tools"), environ.get("PYTHONPATH", "")]  # as in pytest
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environ["GLOO_SOCKET_IFNAME"] = "lo"
    environ["OMP_NUM_THREADS"] = "1"
    return environ


LAUNCHER_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def _start_processes(world: World, address: str) -> list[_Process]:
    """Start one plain Python process per rank."""
    started = []
    for rank in range(world.size):
        command = [sys.executable, str(HERE / "ranks.py"), address, str(rank), world.backend]
        command.append(str(world.directory / f"stacks-{rank}"))
        with world.directory.joinpath(f"stderr-{rank}").open("wb") as stderr:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=rank_environment(),
            )
        started.append(_Process(rank, popen, world.directory))
    return started


def _name(case: Callable[..., Any]) -> str:
    """Return the name by which the ranks import the case: their path has this directory."""
    return f"{case.__module__.rpartition('.')[2]}:{case.__qualname__}"


def _tcp() -> dict[str, Any]:
    return {"init_method": f"tcp://127.0.0.1:{free_port()}", "timeout": patient(60)}


@dataclass(frozen=True)
class Starter:
    """How a backend's ranks are started, and the options of `initialize`."""

    start: Callable[[World, str], list[_Process]]
    options: Callable[[], dict[str, Any]]


def _through_sockets() -> dict[str, Any]:
    """Return the options for gloo alone, without shared memory between ranks of one host."""
    return {**_tcp(), "memory": False}


STARTERS = {
    "gloo": Starter(nursery.start, _through_sockets),
    "memory": Starter(nursery.start, _tcp),
    "nccl": Starter(_start_processes, _tcp),
    "mpi": Starter(starters_mpi.start, starters_mpi.options),
    "horovod": Starter(starters_horovod.start, starters_horovod.options),
    "xla-tpu": Starter(starters_xla.start, starters_xla.options),
}


# ---------------------------------------------------------------- a world


class World:
    """`size` ranks on one backend; `run` runs a function on all of them together."""

    def __init__(self, backend: str, size: int, **options: Any) -> None:
        """`options` are passed to `initialize` in addition to those of the backend's starter."""
        self.backend = backend
        self.size = size
        self.options = options
        self.directory = Path()
        self._ranks: list[_Process] = []
        self._stopped = False

    def __repr__(self) -> str:
        """Return the name as in test ids: gloo-2."""
        return "-".join([self.backend, str(self.size), *map(str, self.options.values())])

    @property
    def pids(self) -> list[int]:
        """The process id of each rank; starts the ranks if necessary."""
        self.start()
        return [process.popen.pid for process in self._ranks]

    def start(self) -> None:
        """Start the ranks unless they are all alive."""
        quieten(but=self)
        if self._ranks and all(process.popen.poll() is None for process in self._ranks):
            return
        self.kill()
        starter = STARTERS[self.backend]
        self.directory = Path(tempfile.mkdtemp(prefix="asynccoll-world-"))
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(self.directory / "socket")
            listener.bind(address)
            listener.listen(self.size)
            self._ranks = starter.start(self, address)
            self._accept(listener)
        options = {**starter.options(), **self.options}
        for process in self._ranks:
            assert process.connection is not None
            process.connection.send_bytes(pickle.dumps((self.size, options)))
        self._collect("initialize", START_SECONDS, dies=())

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.5)
        missing = set(range(self.size))
        while missing:
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                ended = [p for p in self._ranks if p.popen.poll() is not None]
                if ended or time.monotonic() > deadline:
                    self._give_up(f"{self}: ranks {sorted(missing)} did not start", ended)
                continue
            _hello, rank, _pid = pickle.loads(connection.recv_bytes())
            self._ranks[rank].connection = connection
            missing.discard(rank)

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        runner: str = "asyncio",
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout: float = 20.0,
        dies: Iterable[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run `case(me, *args, **kwargs)` on every rank. Returns the results by rank.

        If a rank fails, dies (unless listed in `dies`) or is not done after `timeout` seconds, `RankError`
        says what every rank was doing.
        """
        __tracebackhide__ = True
        self.start()
        signs = Path(tempfile.mkdtemp(prefix="signs-", dir=self.directory))
        for process in self._ranks:
            mine = (*args, *per_rank[process.rank]) if per_rank else args
            process.at, process.failures = "", []
            assert process.connection is not None
            process.connection.send_bytes(pickle.dumps((_name(case), runner, signs, mine, kwargs)))
        name = f"{_name(case)} ({runner})"
        return self._collect(name, timeout, dies=tuple(dies))

    def _collect(self, name: str, timeout: float, dies: tuple[int, ...]) -> list[Any]:
        __tracebackhide__ = True
        results: list[Any] = [None] * self.size
        waiting = {process.connection: process for process in self._ranks}
        deadline = time.monotonic() + patient(timeout)
        broken, raised = False, 0
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(process.rank for process in waiting.values())
                for process in waiting.values():
                    process.failures.append(f"not done in time, at {process.at!r}\n{process.stacks()}")
                self._give_up(f"{name} on {self}: ranks {late} hang", self._ranks)
            for connection in ready:
                process = waiting[connection]
                try:
                    message = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    del waiting[connection]
                    code = process.popen.wait(CLOSE_SECONDS)
                    results[process.rank] = Died(code)
                    if process.rank not in dies:
                        process.failures.append(
                            f"died with code {code} at {process.at!r}\n{process.stderr_tail()}"
                        )
                        broken = True
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    continue
                if message[0] == "at":
                    process.at = message[1]
                elif message[0] == "failed":
                    process.failures.append(f"case {message[1]!r}\n{message[2]}")
                elif message[0] == "raised":
                    del waiting[connection]
                    process.failures.append(f"after case {process.at!r}\n{message[1]}")
                    raised += 1
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                elif message[0] == "done":
                    del waiting[connection]
                    results[process.rank] = message[1]
        if broken or 0 < raised < self.size:
            self._give_up(f"{name} on {self} failed", self._ranks)
        if any(process.failures for process in self._ranks):
            raise RankError(self._report(f"{name} on {self} failed", self._ranks))
        return results

    def _report(self, headline: str, ranks: list[_Process]) -> str:
        lines = [headline]
        for process in ranks:
            shown = process.failures[:5]
            lines += [f"--- rank {process.rank}: {text.rstrip()}" for text in shown]
            if len(process.failures) > len(shown):
                labels = [text.splitlines()[0] for text in process.failures[5:]]
                lines.append(f"--- rank {process.rank}: and {len(labels)} more: {labels[:40]}")
        return "\n".join(lines)

    def _give_up(self, headline: str, ranks: list[_Process]) -> None:
        __tracebackhide__ = True
        for process in ranks:
            if not process.failures:
                state = f"code {process.popen.poll()}, at {process.at!r}"
                process.failures.append(f"{state}\n{process.stderr_tail()}")
        text = self._report(headline, ranks)
        self.kill()
        raise RankError(text)

    def stop(self, yes: bool) -> None:
        """Stop the ranks, or let them continue."""
        if self._ranks and self.backend in RESTLESS and yes is not self._stopped:
            self._stopped = yes
            for process in self._ranks:
                process.popen.send_signal(signal.SIGSTOP if yes else signal.SIGCONT)

    def is_crowded(self) -> bool:
        """Whether a rank has so many threads that they use the processor even when idle."""
        tasks = [Path(f"/proc/{process.popen.pid}/task") for process in self._ranks]
        return any(len(list(task.iterdir())) > CROWD for task in tasks if task.exists())

    def kill(self) -> None:
        """End the ranks now."""
        for process in self._ranks:
            process.popen.kill()  # even if it has ended: killing the last rank also ends the launcher
            process.popen.wait()
            if process.connection is not None:
                process.connection.close()
        if self._ranks:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._ranks = []
        self._stopped = False

    def close(self) -> None:
        """Let the ranks finalize and exit by themselves; raise if they do not."""
        self.stop(False)
        try:
            for process in self._ranks:
                process.failures = []
                if process.popen.poll() is None and process.connection is not None:
                    process.connection.send_bytes(b"")
            self._ended()
        finally:
            self.kill()

    def _ended(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._ranks:
            try:
                code = process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.failures.append(f"does not end\n{process.stacks()}")
            else:
                if code:
                    process.failures.append(f"ended with code {code}\n{process.stderr_tail()}")
        failed = [process for process in self._ranks if process.failures]
        if failed:
            raise RankError(self._report(f"{self} did not close cleanly", failed))


# ---------------------------------------------------------------- the pool

_POOL: dict[tuple[Any, ...], World] = {}
_FRESH: list[World] = []


def world(backend: str, size: int, **options: Any) -> World:
    """Return the world with these parameters, which all tests of the session share."""
    key = (backend, size, *itertools.chain(*sorted(options.items())))
    if key not in _POOL:
        _POOL[key] = World(backend, size, **options)
    return _POOL[key]


@contextlib.contextmanager
def fresh(backend: str, size: int, **options: Any) -> Iterator[World]:
    """Yield a separate world, for tests that break it."""
    one = World(backend, size, **options)
    _FRESH.append(one)
    try:
        yield one
        one.close()
    finally:
        one.kill()
        _FRESH.remove(one)


def quieten(but: World | None = None) -> None:
    """Stop all worlds that would use the processor, except `but`."""
    for one in [*_POOL.values(), *_FRESH]:
        one.stop(one is not but)


def retire() -> None:
    """Close the worlds that have opened many lanes; the next test that uses one starts it again."""
    for one in _POOL.values():
        if one.is_crowded():
            one.close()


def close_all() -> None:
    """Close every world; at the end, raise the first error of one that did not close cleanly."""
    failures = []
    while _POOL:
        _key, one = _POOL.popitem()
        try:
            one.close()
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _kill_all() -> None:
    for one in [*_POOL.values(), *_FRESH]:
        one.kill()


atexit.register(_kill_all)

"""A world of real ranks for tests, on any backend, which is kept alive from one run to the next.

``spawn`` starts the ranks by the backend's launcher. Each rank connects back to the test, and runs what it is
sent until the connection closes. If a run fails, the world is ended, and the next run starts another.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, wait
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from asynccoll.backends.table import usable
from asynccoll.errors import PayloadTypeError
from asynccoll.host.misfits import check_count, fitting
from asynccoll.jobs.whereabouts import find_jobs
from asynccoll.launch.calling import complete
from asynccoll.launch.folding import folded
from asynccoll.launch.spawn import spawn
from asynccoll.runtime.process import current, get_rank
from asynccoll.world.context import Context

__all__ = ["RankError", "World", "world"]

_START_SECONDS = 120.0
_CLOSE_SECONDS = 20.0
#: How long the others may keep running once a rank has failed.
_GRACE_SECONDS = 2.0
#: How long a rank waits for what a function has left in flight.
_SETTLE_SECONDS = 1.0


class RankError(AssertionError):
    """A function failed, hung or died on some rank of a ``World``; the message says what became of each."""


#: By lane on which a rank has made calls: the ranks of its group, and the number of calls.
_Made = dict[str, tuple[tuple[int, ...], int]]


class _Task(NamedTuple):
    """What a rank is to run: found by file and name, as test modules are rarely importable elsewhere."""

    file: str
    module: str
    name: str
    path: list[str]
    arguments: bytes


@fitting
def world(size: int = 2, backend: str = "gloo", **options: object) -> World:
    """Return a world of ``size`` real ranks on ``backend``; they start at the first run and end at ``close``.

    >>> async def total(rank):
    ...     return await ac.all_reduce(rank)
    >>> with asynccoll.testing.world(3) as ranks:
    ...     assert ranks.run(total) == [3, 3, 3]

    ``options`` go to ``ac.spawn``, and those that it does not take to ``ac.initialize``.
    """
    return World(size, backend, **options)


class World:
    """Real ranks that run one function after the other; made by ``world``."""

    def __init__(self, size: int, backend: str, **options: Any) -> None:
        check_count("the size of a world", size)
        self.size: int = size
        self.backend: str = usable(backend)
        self._options = options
        self._ranks: dict[int, Connection] = {}
        self._pids: set[int] = set()
        self._ended: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<asynccoll.testing.World of {self.size} on {self.backend}>"

    def run(self, function: Callable[..., object], *arguments: object, timeout: float = 60.0) -> list[Any]:
        """Return what ``function(rank, *arguments)`` returns, by rank. Coroutine functions run on asyncio.

        ``function`` is at the top level of its module; arguments and results are pickled. Each rank has
        joined the world. If ranks leave calls in flight, or have not made equally many, the next run starts
        new ranks, as its calls would be paired with the leftover ones.

        Raises:
            RankError: it raised on some rank, a rank died, or one was not done after ``timeout`` seconds: the
                message says which ranks are waited for, and where each one is. The ranks are ended, and the
                next run starts new ones.
            PayloadTypeError: ``function`` cannot be found by its name.
        """
        __tracebackhide__ = True
        task = pickle.dumps(_task(function, arguments))
        if not self._ranks:
            self._start()
        try:
            self._send(task)
            results, made = self._collect(function.__qualname__, timeout)
        except BaseException:
            self.kill()
            raise
        if not _in_step(made):
            self.kill()
        return results

    def close(self) -> None:
        """Let the ranks finalize and end."""
        for connection in self._ranks.values():
            with suppress(OSError):
                connection.send_bytes(b"")
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the ranks now."""
        for pid in self._pids if self._thread is not None and self._thread.is_alive() else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._ranks.values():
            connection.close()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        self._ranks, self._pids, self._thread = {}, set(), None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting

    def _start(self) -> None:
        __tracebackhide__ = True
        self._ended = []
        directory = tempfile.mkdtemp(prefix="asynccoll-world-")  # only this user has access
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = str(Path(directory, "socket"))
                listener.bind(address)
                listener.listen(self.size)
                self._thread = threading.Thread(target=self._spawn, args=(address,), daemon=True)
                self._thread.start()
                self._accept(listener)
        except BaseException:
            self.kill()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _spawn(self, address: str) -> None:
        try:
            spawn(self.backend, _serve, (address,), nproc_per_node=self.size, **self._options)
        except BaseException as error:  # reported by the thread that waits for the ranks
            self._ended.append(error)

    def _accept(self, listener: socket.socket) -> None:
        __tracebackhide__ = True
        listener.settimeout(0.2)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < self.size:
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._ended or time.monotonic() > deadline:
                    raise RankError(f"{self!r} did not start\n{self._last_words()}") from None
                continue
            rank, pid = pickle.loads(connection.recv_bytes())  # noqa: S301  # our own process, see mkdtemp
            self._ranks[rank] = connection
            self._pids.add(pid)

    # Collecting

    def _collect(self, name: str, timeout: float) -> tuple[list[Any], list[_Made | None]]:
        """Return the results, and what each rank has called so far."""
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        verdict = ""
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = "when another had failed" if failures else f"after {timeout:g} s"
                hang, stands = self._whereabouts()
                verdict = verdict or hang
                failures |= {rank: f"not done {late}{stands.get(rank, '')}" for rank in waiting.values()}
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failure, *told = pickle.loads(connection.recv_bytes())  # noqa: S301  # see _accept
                except (EOFError, ConnectionResetError):
                    failure = f"its process has ended\n{self._why_ended()}"
                if not failure:
                    results[rank] = told
                else:
                    failures[rank] = failure
                    verdict = verdict or f": rank {rank}: {failure.rstrip().splitlines()[-1]}"
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            told = "\n".join(f"--- rank {rank}: {failures[rank].rstrip()}" for rank in sorted(failures))
            raise RankError(f"{name} failed on {self!r}{verdict}\n{told}")
        both = [results[rank] for rank in range(self.size)]
        return [result for result, _ in both], [made for _, made in both]

    def _whereabouts(self) -> tuple[str, dict[int, str]]:
        """Return which ranks the others wait for, and where each of them is; empty if that is not known."""
        ours = (
            job for job in find_jobs(str(os.getpid())) if self._pids & {one.peer.pid for one in job.ranks}
        )
        job = next(ours, None)
        if job is None:
            return "", {}
        stands = {one.rank: f"; it is in {one.account.stands}" for one in job.ranks if one.account.stands}
        return f": {job.hang}" if job.hang else "", stands

    def _send(self, task: bytes) -> None:
        for rank, connection in self._ranks.items():
            try:
                connection.send_bytes(task)
            except OSError:
                told = self._why_ended()
                raise RankError(f"rank {rank} has ended since the last run: {told}".rstrip(": ")) from None

    def _why_ended(self) -> str:
        """Return the error of ``spawn``, which notices that a rank has ended, and ends the others."""
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS)
        return "\n".join(map(str, self._ended))

    def _last_words(self) -> str:
        return "\n".join(map(str, self._ended)) or f"not all ranks were there after {_START_SECONDS:g} s"


def _in_step(made: Sequence[_Made | None]) -> bool:
    """Whether the ranks have made equally many calls on each lane, and left none in flight."""
    known = [one for one in made if one is not None]
    lanes = {key: ranks for one in known for key, (ranks, _) in one.items()}
    return len(known) == len(made) and all(
        len({known[rank].get(key, (ranks, 0))[1] for rank in ranks}) == 1 for key, ranks in lanes.items()
    )


def _task(function: Callable[..., object], arguments: Sequence[object]) -> _Task:
    name = getattr(function, "__qualname__", "<")
    file = inspect.getsourcefile(function) if callable(function) and "<" not in name else None
    if file is None:
        raise PayloadTypeError(
            f"a World runs functions that stand at the top level of a module, got {function!r}; pass what it "
            "needs as arguments"
        )
    return _Task(file, function.__module__, name, list(sys.path), pickle.dumps(arguments))


# In a rank


def _serve(_: int, address: str) -> None:
    """Run the tasks that arrive, until an empty message or the end of the connection."""
    connection = Client(address, "AF_UNIX")
    connection.send_bytes(pickle.dumps((get_rank(), os.getpid())))
    with suppress(EOFError):  # the test process is gone
        while data := connection.recv_bytes():
            connection.send_bytes(_outcome(pickle.loads(data)))  # noqa: S301  # from our parent


def _outcome(task: _Task) -> bytes:
    try:
        sys.path += [entry for entry in task.path if entry not in sys.path]
        function = attrgetter(task.name)(_module(task))
        arguments = pickle.loads(task.arguments)  # noqa: S301  # from our parent
        world = current()
        result = complete(function, get_rank(), *arguments)
        return pickle.dumps(("", result, _made(world)))
    except BaseException:  # whatever it is, report it to the test
        return pickle.dumps((folded(traceback.format_exc()),))


def _made(world: Context) -> _Made | None:
    """Return what this rank has called so far; None if it has left the world, or has calls in flight."""
    if world.closed or world.drain(_SETTLE_SECONDS):
        return None
    lanes = [lane for group in world.groups.values() for lane in group.opened.values()]
    return {f"{lane.group.key}/{lane.key}": (lane.group.ranks, lane.sequence) for lane in lanes}


def _module(task: _Task) -> ModuleType:
    """Return the function's module, loaded from its file unless it is imported already."""
    known = sys.modules.get(task.module)
    if known is not None and getattr(known, "__file__", None) == task.file:
        return known
    spec = importlib.util.spec_from_file_location(task.module, task.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[task.module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

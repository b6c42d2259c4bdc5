"""``spawn``: runs a function on ranks in their own processes, started from this one.

What starts them depends on the backend: a table, one row each. The ranks of c10d backends are started
by torch.multiprocessing and meet in a store that this process serves, those of mpi by the mpiexec of
this environment, those of horovod by ``horovod.run``. The ranks of xla-tpu are threads of one new process,
one for each device. A rank calls ``initialize``, the function, ``finalize``.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing import spawn as preparing
from multiprocessing.connection import wait
from pathlib import Path
from types import NoneType
from typing import Any

from asynccoll.backends.api.request import ARGUMENTS, check_backend_options
from asynccoll.backends.choosing import options_of
from asynccoll.backends.table import starting, usable
from asynccoll.backends.xla import threads as xla_threads
from asynccoll.environment.nodes import Nodes
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.exits import in_main_thread
from asynccoll.host.misfits import check, fitting
from asynccoll.launch import child, mpiexec, passing, planned_rank, xla_rank
from asynccoll.launch.calling import check_called, complete
from asynccoll.launch.job import Job, failed, portable
from asynccoll.launch.processes import end
from asynccoll.launch.ranks import naming, without_place
from asynccoll.launch.witness import Witness
from asynccoll.runtime.process import finalize, initialize

_START_METHODS = ("spawn", "fork", "forkserver")
#: Arguments of ``spawn`` that ``initialize`` does not take.
ABOUT_STARTING = frozenset({"start_method", "daemon", "join", "hosts"})
_NODES = ("nnodes", "node_rank", "master_addr", "master_port", "init_method")


@fitting
def spawn(
    backend: str,
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    kwargs_dict: Mapping[str, object] | None = None,
    nproc_per_node: int = 1,
    **kwargs: object,
) -> object:
    """Run ``fn(local_rank, *args, **kwargs_dict)`` on ``nproc_per_node`` ranks; return when all are done.

    >>> ac.spawn("gloo", train, (config,), nproc_per_node=2)

    Each rank is a process that has joined a world on ``backend`` (as ``ac.initialize`` does) when ``fn`` is
    called, and leaves it afterwards. ``fn`` is found by its name there, so it has to be at the top level of a
    module (or a script guarded by ``if __name__ == "__main__":``); with cloudpickle installed it may be any
    function. An ``async def`` is run by ``asyncio.run``. ``serial`` runs it in this process.

    Args:
        backend: as for ``ac.initialize``.
        fn: called with the rank's index on this node, then ``args`` and ``kwargs_dict``.
        args, kwargs_dict: its further arguments.
        nproc_per_node: the number of ranks on this node.
        kwargs: for gloo, nccl and other backends of torch: ``nnodes``, ``node_rank``, ``master_addr``,
            ``master_port``, ``init_method``, ``start_method`` (``"spawn"``, the default, ``"fork"`` or
            ``"forkserver"``), ``daemon``, and ``join`` (with ``join=False`` torch's process context is
            returned immediately); for horovod ``hosts``, as ``horovod.run`` takes it (``"host1:2,host2:2"``,
            ``nproc_per_node`` ranks in all). All others go to ``ac.initialize``: ``timeout``, ``check``, ...

    Raises:
        SpawnError: a rank failed; the text has the traceback of the first that did.
        InvalidArgumentError: values that contradict each other.
        BackendNotFoundError: the backend, or the launcher of its ranks, is not installed.
    """
    name = usable(backend)
    Nodes(nproc_per_node)  # refuses what is no number of ranks
    check_called(fn, args, kwargs_dict)
    check_keywords(name, kwargs)
    task = Job(name, fn, tuple(args), dict(kwargs_dict or {}))
    return _STARTERS[starting(name)](task, nproc_per_node, dict(kwargs))


def check_keywords(backend: str, given: Collection[str]) -> None:
    """Refuse keywords that neither ``spawn`` nor ``initialize`` takes, before a rank starts."""
    known = options_of(backend)
    if known is not None:  # otherwise only the backend knows them, and refuses them in the ranks
        arguments = {"nproc_per_node", *_NODES, *ABOUT_STARTING, *ARGUMENTS}
        check_backend_options(backend, {*given} - arguments, known, arguments)


@contextlib.contextmanager
def _reporting(task: Job) -> Iterator[Job]:
    """Yield the job with a temporary directory for the ranks' errors."""
    with tempfile.TemporaryDirectory(prefix="asynccoll-spawn-", ignore_cleanup_errors=True) as made:
        yield replace(task, directory=made)


# The world of one


def _spawn_serial(task: Job, ranks: int, kwargs: dict[str, Any]) -> None:
    _one_node(task, kwargs)
    if ranks != 1:
        raise InvalidArgumentError(f"backend 'serial' is a world of one, got nproc_per_node={ranks}")
    initialize(task.backend, **kwargs)
    try:
        complete(task.function, 0, *task.args, **task.kwargs)
    finally:
        finalize()


def _one_node(task: Job, kwargs: dict[str, object]) -> None:
    """Remove the arguments about nodes from ``kwargs``; there is only this one."""
    nnodes, node_rank = kwargs.pop("nnodes", 1), kwargs.pop("node_rank", 0)
    if (nnodes, node_rank) != (1, 0):
        raise InvalidArgumentError(
            f"spawn starts {task.backend} ranks on this node only, got nnodes={nnodes}, "
            f"node_rank={node_rank}; on several nodes start the script with the backend's own launcher"
        )
    _check_starting(task, kwargs)


def _check_starting(task: Job, kwargs: dict[str, object]) -> None:
    """Refuse what is left of the arguments about starting ranks."""
    if unknown := ABOUT_STARTING & kwargs.keys():
        raise InvalidArgumentError(
            f"spawn starts {task.backend} ranks without {', '.join(f'{name}=' for name in sorted(unknown))}, "
            f"which {'is' if len(unknown) == 1 else 'are'} for ranks of other backends; leave it out"
        )


# torch.multiprocessing


def _spawn_processes(task: Job, ranks: int, kwargs: dict[str, Any]) -> object:
    nodes = Nodes(ranks, **{name: kwargs.pop(name, None) for name in _NODES})
    how, join = _start_options(kwargs), kwargs.pop("join", True)
    _check_starting(task, kwargs)
    if how["start_method"] != "fork":
        task = replace(task, function=portable(task.function))
    variables, store = _meeting(nodes)
    with _reporting(replace(task, options=kwargs)) as told:
        named = naming(told.directory, alone=nodes.nnodes == 1)
        witness = Witness(Path(told.directory))
        started: list[Any] = []
        try:
            context = _kept(lambda: _started(started, ranks, (told, nodes, variables, named), how))
            if join:
                _joined(context, told, nodes, witness.watch())
                return None
        except BaseException:  # Ctrl-C, say: nothing waits for the ranks, and they may wait for others
            end([process for one in started for process in one.processes])
            for left in (file for one in started for file in one.error_files):
                Path(left).unlink(missing_ok=True)  # written by ranks that failed, for torch to read
            raise
        finally:
            witness.ended()
        context.asynccoll_store = store  # the ranks meet there for as long as they live
        return context


def _started(started: list[Any], ranks: int, told: tuple[object, ...], how: Mapping[str, Any]) -> Any:
    """Start all ranks; return torch's context. Each rank's own is appended to ``started``."""
    import torch.multiprocessing as mp  # heavy, and only for this

    start: Any = mp.start_processes
    program = _forked_rank if how["start_method"] == "fork" else _rank
    started.extend(start(program, (rank, *told), 1, join=False, **how) for rank in range(ranks))
    of_all: Any = mp.ProcessContext
    processes = [process for one in started for process in one.processes]
    return of_all(processes, [file for one in started for file in one.error_files])


def _joined(context: Any, told: Job, nodes: Nodes, witness: Witness) -> None:
    """Wait until all ranks have ended, and raise what one failed with."""
    import torch.multiprocessing as mp

    try:
        while not context.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        codes = {nodes.first + error.error_index: getattr(error, "exit_code", 1)}
        here = range(nodes.first, nodes.first + nodes.nproc_per_node)
        raise failed(told, here, codes, str(error), witness.flights()) from None


def _kept(start: Callable[[], Any]) -> Any:
    """Return what ``start`` returns, called on a thread that lives as long as the ranks that it starts.

    The kernel ends ranks with their parent, which is the thread that started them, not its process.
    """
    if in_main_thread():
        return start()
    started: Future[object] = Future()

    def keep() -> None:
        left: set[int] = set()
        try:
            context = start()
            # Duplicates: joining the ranks may close the originals meanwhile.
            left.update(os.dup(process.sentinel) for process in context.processes)
        except BaseException as error:
            for copy in left:
                os.close(copy)
            started.set_exception(error)
            return
        started.set_result(context)
        while left:
            for ended in wait(left):
                assert isinstance(ended, int)
                os.close(ended)
                left.discard(ended)

    threading.Thread(target=keep, name="asynccoll-parent-of-ranks", daemon=True).start()
    return started.result()


def _start_options(kwargs: dict[str, object]) -> dict[str, object]:
    """Return the options for torch.multiprocessing, removed from ``kwargs``."""
    # Functions of a notebook are in no file: only a forked process has them.
    method = kwargs.pop("start_method", "fork" if hasattr(builtins, "__IPYTHON__") else "spawn")
    if method not in _START_METHODS:
        raise InvalidArgumentError(
            f"start_method must be one of {', '.join(map(repr, _START_METHODS))}, got {method!r}"
        )
    return {"daemon": kwargs.pop("daemon", False), "start_method": method}


def _meeting(nodes: Nodes) -> tuple[dict[str, object], object]:
    """Return the variables that tell the ranks where they meet, and the store if this process serves it."""
    if nodes.init_method not in (None, "env://"):
        return {}, None
    if nodes.named:
        return {"MASTER_ADDR": nodes.address, "MASTER_PORT": nodes.port}, None
    from asynccoll.launch.loopback import ADDRESS, listening_store

    store = listening_store(0)
    # How torch elastic tells its workers of a store that it serves for them.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True}
    return {"MASTER_ADDR": ADDRESS, "MASTER_PORT": store.port, **agent}, store


def _forked_rank(*told: Any) -> None:
    """Run one forked rank: the threads of its parent are gone, and torch would wait for them forever."""
    import torch

    torch.set_num_threads(1)
    _rank(*told)


def _rank(
    _index: int,
    local_rank: int,
    task: Job,
    nodes: Nodes,
    variables: Mapping[str, object],
    named: Mapping[str, str],
) -> None:
    """Run one rank."""
    parent = parent_process()
    child.die_with_launcher()
    if parent is not None and not parent.is_alive():  # it died before the line above took effect
        os._exit(128 + signal.SIGKILL)
    for name in os.environ.keys() - without_place(os.environ).keys():
        del os.environ[name]
    os.environ.update(named)
    rank = nodes.first + local_rank
    place = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": nodes.world_size,
        "LOCAL_WORLD_SIZE": nodes.nproc_per_node,
        "GROUP_RANK": nodes.node_rank,
        "GROUP_WORLD_SIZE": nodes.nnodes,
        **variables,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    if variables:
        task.carry_out(rank, local_rank)
    else:
        method = nodes.init_method
        task.carry_out(rank, local_rank, init_method=method, rank=rank, world_size=nodes.world_size)


# mpiexec


def _spawn_mpi(task: Job, ranks: int, kwargs: dict[str, object]) -> None:
    _one_node(task, kwargs)
    launcher = mpiexec.find()
    environ = launcher.environment(without_place(os.environ))
    _run_by_plan(
        replace(task, options=kwargs),
        ranks,
        lambda plan: launcher.command(ranks, [sys.executable, str(Path(planned_rank.__file__)), plan]),
        environ,
        "mpiexec",
    )


def _run_by_plan(
    task: Job, ranks: int, line: Callable[[str], list[str]], environ: Mapping[str, str], who: str
) -> None:
    """Run a program that reads the job from the file it is given; raise what a rank failed with."""
    with _planned(task) as (told, plan):
        variables = {**environ, **naming(told.directory)}
        with passing.launched(line(plan), variables, subprocess.DEVNULL) as running:
            code = running.wait()
        if code:
            text = f"{who} ended with code {code}; its output is above"
            raise failed(told, range(ranks), {}, text)


@contextlib.contextmanager
def _planned(task: Job) -> Iterator[tuple[Job, str]]:
    """Yield the job, and the file in which its ranks find it."""
    with _reporting(replace(task, function=portable(task.function))) as told:
        plan = Path(told.directory, "job")
        plan.write_bytes(_plan(told))
        yield told, str(plan)


def _plan(task: Job) -> bytes:
    """Return two pickles: how to prepare an interpreter for the job, and the job."""
    return pickle.dumps(_preparation()) + pickle.dumps(task)


def _preparation() -> dict[str, object]:
    """Return what multiprocessing tells a new interpreter, to find the same modules and ``__main__``."""
    data = preparing.get_preparation_data("asynccoll-rank")
    data.pop("authkey", None)  # a secret of this process, which must not be written to a file
    return {**data, "start_method": "spawn"}


# horovod.run


def _spawn_horovod(task: Job, ranks: int, kwargs: dict[str, object]) -> None:
    hosts = kwargs.pop("hosts", None)
    _one_node(task, kwargs)
    if not in_main_thread():
        raise InvalidArgumentError("Horovod starts ranks from the main thread only; call ac.spawn there")
    check("hosts", hosts, (str, NoneType), 'a text such as "host1:2,host2:2"')
    import horovod

    with _reporting(replace(task, function=portable(task.function), options=kwargs)) as told:
        environ = without_place(os.environ)
        try:
            with _environment(environ), _handlers_kept():
                # As bytes: other hosts do not see our files.
                horovod.run(planned_rank.main, (_plan(told),), num_proc=ranks, hosts=hosts, use_gloo=True)
        except RuntimeError as error:
            raise failed(told, range(ranks), {}, str(error)) from None
        except ValueError as error:
            if hosts is None:
                raise
            # Horovod's error for impossible hosts.
            raise InvalidArgumentError(f"hosts={hosts!r} for {ranks} ranks: {error}") from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM: Horovod's would leave this process deaf to both."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment while a launcher copies it."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# torch_xla


def _spawn_xla(task: Job, ranks: int, kwargs: dict[str, object]) -> None:
    _one_node(task, kwargs)
    environ = without_place(os.environ)
    if not environ.get("PJRT_DEVICE", "CPU").startswith("TPU"):
        xla_threads.environment(ranks, environ)
    program = str(Path(xla_rank.__file__))
    _run_by_plan(
        replace(task, options={**kwargs, "world_size": ranks}),
        ranks,
        lambda plan: [sys.executable, program, plan],
        environ,
        "the process of the replicas",
    )


#: By how ``backends.table`` says that a backend's ranks are started.
_STARTERS: dict[str, Callable[[Job, int, dict[str, object]], object]] = {
    "here": _spawn_serial,
    "processes": _spawn_processes,
    "mpiexec": _spawn_mpi,
    "horovod": _spawn_horovod,
    "replicas": _spawn_xla,
}

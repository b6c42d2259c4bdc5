"""``initialize``, ``finalize``, a block between the two, and which context a call runs in.

The current context is looked up, never assumed: the calling thread's or task's own (where ranks are threads
of one process), else the process's, else one on torch's default group if the user made one (*adopted*), else
the *embedded* world of one, unless a launcher says that this process is one of several.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from asynccoll import host
from asynccoll.backends import choosing, table
from asynccoll.backends.api.request import of_torch
from asynccoll.environment.detection import detect
from asynccoll.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    NotInitializedError,
)
from asynccoll.flight import registry
from asynccoll.health.stalls import stall_seconds
from asynccoll.host import actors
from asynccoll.host import exits as exiting
from asynccoll.host.endings import is_failure
from asynccoll.host.misfits import fitting, integer
from asynccoll.host.timeouts import NEVER_SECONDS, check_timeout
from asynccoll.runtime.forked import forget_torch, forked, parent, refused
from asynccoll.runtime.state import of_thread, process, rank_here, torch_group
from asynccoll.waiting import forgotten
from asynccoll.world.context import Context
from asynccoll.world.group import Group, GroupLike
from asynccoll.world.resolving import check_ranks, resolve_group

CHECK_VARIABLE = "ASYNCCOLL_CHECK"
MEMORY_VARIABLE = "ASYNCCOLL_MEMORY"
BACKEND_VARIABLE = "ASYNCCOLL_BACKEND"
_CHECKS = ("off", "local", "full")

#: Functions that are called with the context of each world that this process joins.
_renewed: list[Callable[[Context], object]] = []
when_joined: Callable[[Callable[[Context], object]], None] = _renewed.append


def current() -> Context:
    """Return the context a call runs in; raises ``NotInitializedError`` if there is none."""
    return rank_here() or process.context or _implicit()


def existing() -> Context | None:
    """Return the context a call would run in, or None if there is none yet; never makes one."""
    adopted = process.adopted[1] if process.adopted else None
    known = (of_thread.get(), process.context, adopted, process.embedded)
    return next((context for context in known if context is not None and not context.closed), None)


def known() -> Context:
    """Return the context that says which rank this is: a call's, or the parent's in a forked child."""
    if rank_here() is None and (before := parent()) is not None:
        return before
    return current()


def _implicit() -> Context:
    """Return the context of a call without ``initialize``; ``NotInitializedError`` if that is required."""
    if process.thread_ranks:
        context = _of_backward(process.thread_ranks)
        if context is not None:
            return context
        raise NotInitializedError(
            "ranks are threads of this process, and this thread is none of them: call from the thread "
            "that called ac.initialize, or from a task or thread that inherits its context "
            "(contextvars.copy_context().run)"
        )
    if torch_group() is not None:
        return _adopt()
    if (before := parent()) is not None:
        raise refused(before)
    if process.left is not None:
        raise NotInitializedError("asynccoll was finalized; call ac.initialize() again before any collective")
    said = os.environ.get("WORLD_SIZE")  # may be set by hand later; a launcher sets it before the start
    if process.embedded is not None and process.said == said:
        return process.embedded
    info = detect(os.environ)
    if info.world_size > 1:
        # `asynccoll run` sets torchrun's variables and one of ours.
        ours = info.launcher == "torchrun" and registry.VARIABLE in os.environ
        who = "`asynccoll run`" if ours else info.launcher
        raise NotInitializedError(
            f"this is rank {info.rank} of {info.world_size} (according to the variables of {who}), but "
            "ac.initialize() was not called; call it at the start of the program"
        )
    with process.lock:
        if process.embedded is None:
            process.embedded = choosing.alone()
        process.said = said
        return process.embedded


def _of_backward(contexts: list[Context]) -> Context | None:
    """Return the rank for whose device autograd's own thread runs backward; None on any other thread."""
    if torch._C._current_graph_task_id() == -1:
        return None
    for context in list(contexts):
        if context.backend.serves_this_thread():
            return context
    return None


def _adopt() -> Context:
    """Return the context on torch's default group; make it if there is none for this group.

    The user creates and destroys the group with torch: this library only uses it.
    """
    native = dist.distributed_c10d._get_default_group()
    with process.lock:
        if process.adopted is not None:
            if process.adopted[0]() is native:
                return process.adopted[1]
            _abandon(process.adopted[1])
        store = dist.distributed_c10d._get_default_store()
        context = choosing.adopt(
            of_torch(), store, dist.get_rank(), dist.get_world_size(), 1800.0, _check_mode(None)
        )
        process.adopted = (weakref.ref(native), context)
        try:
            context.begin()
        except BaseException:
            _abandon(context)
            raise
        _end_world_of_one()
        _install_exit_hook()
    _tell_joined(context)
    return context


def _tell_joined(context: Context) -> None:
    """Call what was registered with ``when_joined``, as higher layers do when they are imported."""
    importlib.import_module("asynccoll.public")
    for renew in _renewed:
        renew(context)


def _end_world_of_one() -> None:
    """Close the world of one that preceded this one: anything bound to it would silently keep working."""
    alone, process.embedded = process.embedded, None
    if alone is not None:
        alone.close(abort=False)


@fitting
def initialize(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float = 1800.0,
    check: str | None = None,
    stall_warning: float | None = None,
    memory: bool | None = None,
    **backend_options: object,
) -> None:
    """Join the world; every rank calls it before its first collective.

    Without arguments it follows the launcher's environment (torchrun, ``asynccoll run``, SLURM, mpiexec,
    horovodrun), and makes a world of one if there is no launcher.

    Args:
        backend: ``"gloo"``, ``"nccl"``, ``"mpi"``, ``"serial"``, ... (in any case), or torch's
            ``"cpu:gloo,cuda:nccl"``. None selects serial without a launcher, mpi under mpiexec, horovod under
            horovodrun, xla-tpu on a TPU; else nccl with a GPU for each local rank, else gloo. (The
            environment variable ``ASYNCCOLL_BACKEND`` overrides this.)
        init_method: ``env://`` (the default), ``tcp://host:port`` or ``file:///path``, as in
            ``torch.distributed.init_process_group``.
        store: an explicit ``torch.distributed`` store instead; needs ``rank`` and ``world_size``. With a
            ``HashStore``, which lives in one process, ranks are taken to be threads of that process.
        rank, world_size: this process's place; from the environment if not given.
        timeout: seconds an operation may take before it fails with ``CollectiveTimeoutError``;
            ``math.inf`` for no limit.
        check: ``"off"``, ``"local"`` (the default: concurrent tasks that use one lane, and ranks that call
            different operations, get errors; docs/faults.md lists what it misses) or ``"full"`` (the
            signatures of all ranks are compared before every call). The environment variable
            ``ASYNCCOLL_CHECK`` sets the default.
        stall_warning: how many seconds to wait for a call before warning once, on stderr and by the logger
            ``asynccoll.stall``, which ranks the call waits for. 0: never, and no warning about ranks that
            are a call apart either (docs/faults.md). The default is 30, or the value of the environment
            variable ``ASYNCCOLL_STALL_WARNING``.
        memory: whether ranks of one host exchange CPU tensors, numbers and objects through shared memory, if
            the backend is gloo or combines gloo with another one. True, the default: if they are found to
            share memory. False: always through sockets. The environment variable ``ASYNCCOLL_MEMORY`` (``1``
            or ``0``) sets the default. Must be the same on every rank.
        backend_options: further options of the chosen backend (gloo: ``interface``, the name of the network
            interface, and ``by_node``, whether calls on several nodes go through each node first: True at
            any size, False never); unknown ones are refused.

    Raises:
        InvalidArgumentError: called twice, or arguments that contradict each other.
        BackendNotFoundError: an unknown backend, or its package is missing (with the line to install it).
        LaunchEnvironmentError: the launcher's variables are incomplete or contradict each other.
        CollectiveTimeoutError: other ranks did not join in time.
    """
    mode = _check_mode(check)
    stall = stall_seconds(stall_warning)
    check_timeout(timeout, optional=False)
    with process.lock:
        if rank_here() is not None or process.context is not None:
            raise _initialized()
        if backend is None:
            backend = os.environ.get(BACKEND_VARIABLE) or None
        if forked():
            forget_torch()
    context = choosing.create(
        backend,
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=min(timeout, NEVER_SECONDS),
        check=mode,
        memory=_uses_memory(memory),
        options=backend_options,
    )
    context.stall_seconds = stall
    try:
        _enter(context)
    except BaseException:
        _abandon(context)
        raise


def _initialized() -> InvalidArgumentError:
    here = current()
    return InvalidArgumentError(f"asynccoll is already initialized ({here!r}): {here.instead}")


def _enter(context: Context) -> None:
    """Make ``context`` the world that calls run in."""
    context.begin()
    with process.lock:
        if context.thread_rank:
            process.thread_ranks.append(context)
            of_thread.set(context)
        elif process.context is not None:  # another thread has joined a world meanwhile
            raise _initialized()
        else:
            process.context = context
        process.left = None
        _end_world_of_one()
        _install_exit_hook()
    _tell_joined(context)
    actors.current()  # recorded now, so that tasks started by this one are known to descend from it


def _uses_memory(memory: bool | None) -> bool:
    if memory is None:
        said = os.environ.get(MEMORY_VARIABLE) or "1"
        if said not in ("0", "1"):
            raise InvalidArgumentError(f"{MEMORY_VARIABLE} must be 0 or 1, got {said!r}")
        return said == "1"
    if not isinstance(memory, bool):
        raise InvalidArgumentError(f"memory must be True, False or None, got {memory!r}")
    return memory


def _check_mode(check: str | None) -> str:
    mode = check if check is not None else os.environ.get(CHECK_VARIABLE) or "local"
    if mode not in _CHECKS:
        raise InvalidArgumentError(f"check must be one of {', '.join(map(repr, _CHECKS))}, got {mode!r}")
    return mode


@fitting
def finalize(*, abort: bool = False) -> None:
    """Leave the world: wait for work in flight, then close everything this package opened.

    Every rank calls it. With ``abort=True`` nothing is waited for: works in flight fail with ``AbortedError``
    here, and the peers' with ``PeerLostError``. Ctrl-C while it waits has the same effect, and is raised once
    everything is closed. A process group that the user made stays open. Does nothing if there is nothing to
    finalize.

    Work that fails meanwhile is not in flight any more: a send or a recv whose other side is never called
    fails once that rank has left, and raises where it is awaited, not here.

    Raises:
        CollectiveTimeoutError: work was still in flight after the context's timeout; it was then aborted. The
            error names the ranks that the first of it waited for.
        UnawaitedWorkWarning: where warnings are errors (``python -W error``), the first warning about a work
            that was dropped without being awaited. By then the world has been left.
    """
    leave(sys.exc_info()[1], abort=abort)


def leave(error: BaseException | None, *, abort: bool) -> None:
    """Do what ``finalize`` does, for a program that leaves because of ``error``, which its peers can read."""
    context = rank_here() or process.context or (process.adopted[1] if process.adopted else None)
    if context is None:
        return
    try:
        stuck = [] if abort else context.drain(context.timeout)
        told = str(stuck)  # formatted now, while they say what they wait for: closing ends them
        found = context.blame(stuck[0]) if stuck else None
    except (Exception, KeyboardInterrupt, SystemExit) as interrupt:  # stop waiting
        _close(context, abort=True, error=error or interrupt)
        raise
    _close(context, abort=abort or bool(stuck), error=error)
    unawaited = forgotten.raised()
    if found is not None:
        why = f"finalize aborted what was still in flight: {told}{f'; {found}' if str(found) else ''}"
        raise CollectiveTimeoutError(why, found.ranks)
    if unawaited is not None and error is None and not abort:
        raise unawaited


def _close(context: Context, **how: Any) -> None:
    """Call ``context.close(**how)``, and forget the context even if that raises."""
    try:
        context.close(**how)
    finally:
        _forget(context)


def _forget(context: Context) -> None:
    with process.lock:
        if context.thread_rank:
            of_thread.set(None)
            process.thread_ranks[:] = [one for one in process.thread_ranks if one is not context]
        elif process.context is context:
            process.context = None
            process.left = context.identity
        elif process.adopted is not None and process.adopted[1] is context:
            process.adopted = None


def refresh() -> str:
    """Close a context whose torch group the user has destroyed or replaced.

    Returns the kind of world that this process is in: ``"ours"`` (``initialize`` was called), ``"adopted"``
    or ``"none"``.
    """
    context = rank_here() or process.context or _of_backward(process.thread_ranks)
    if context is not None:
        if not context.backend.orphaned():
            return "ours"
        _abandon(context)
    if forked():
        return "adopted" if process.parent_adopted else "ours"
    native = None if process.thread_ranks else torch_group()
    if process.adopted is not None and (native is None or process.adopted[0]() is not native):
        _abandon(process.adopted[1])
    return "none" if native is None else "adopted"


def _abandon(context: Context) -> None:
    """Close a context that can no longer be used, without waiting for peers: they do the same, or notice."""
    _close(context, abort=True, patience=0.0)


def _install_exit_hook() -> None:
    exiting.install(_open_worlds, _forget)


def _open_worlds() -> list[Context]:
    """Return the worlds to leave when the process exits; ranks that are threads leave their own."""
    contexts = [process.context, process.adopted[1] if process.adopted else None]
    return [context for context in contexts if context is not None]


# Where am I


def is_initialized() -> bool:
    """Whether ``initialize`` was called (and ``finalize`` not since), or a torch group is there to adopt.

    In a forked child: whether that was so in its parent.
    """
    if rank_here() is not None or process.context is not None or forked():
        return True
    return not process.thread_ranks and torch_group() is not None


def get_rank(group: GroupLike = None) -> int:
    """Return this rank's index in ``group`` (the world by default); -1 outside of it."""
    context = known()
    return context.rank if group is None else resolve_group(context, group).rank


def was_rank(*, local: bool = False) -> int:
    """Return ``get_rank()`` or ``get_local_rank()``; after ``finalize``, the value it had before."""
    try:
        return get_local_rank() if local else get_rank()
    except NotInitializedError:
        if process.left is None:
            raise
        return process.left.local_rank if local else process.left.rank


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in ``group`` (the world by default); -1 outside of it."""
    context = known()
    if group is None:
        return context.world_size
    resolved = resolve_group(context, group)
    return resolved.size if resolved.rank >= 0 else -1


def get_local_rank() -> int:
    """Return this rank's index among the ranks of its node."""
    return known().identity.local_rank


def get_nproc_per_node() -> int:
    """Return the number of ranks on this node."""
    return known().identity.nproc_per_node


def get_nnodes() -> int:
    """Return the number of nodes."""
    return known().identity.nnodes


def get_node_rank() -> int:
    """Return the index of this node."""
    return known().identity.node_rank


def device() -> torch.device:
    """Return the device of this rank's tensors: its GPU with nccl and Horovod, the CPU with gloo and mpi."""
    return known().backend.device


def backend() -> str:
    """Return the name of the backend in use: ``"gloo"``, ``"nccl"``, ``"serial"``, ..."""
    return known().backend.name


def hostname() -> str:
    """Return the name of this node."""
    return host.gethostname()


def available_backends() -> tuple[str, ...]:
    """Return the backends that ``initialize`` can load here, sorted."""
    return table.available()


@partial(
    fitting,
    left_out={
        "backend": "a group uses the world's backend",
        "timeout": "it is an argument of each call",
        "use_local_synchronization": "only the members of a group need to call this",
        "pg_options": "a group uses the world's options",
        "group_desc": "a group is named by its ranks",
        "device_id": "a group uses the world's device",
    },
)
def new_group(ranks: object) -> Group:
    """Return the group of the global ``ranks`` (sorted, as in torch).

    Only its members need to call it; on Horovod every rank must. Nothing is sent: a group connects in its
    first call. Members pass it as ``group=``; on other ranks ``get_rank(group)`` is -1. Calling it again with
    the same ranks returns the same group.

    >>> outer = ac.new_group([0, 2])                          # three ranks
    >>> if ac.get_rank(outer) >= 0:                           # 0 on rank 0, 1 on rank 2, -1 on rank 1
    ...     await ac.all_reduce(x, group=outer)               # the sum over ranks 0 and 2

    Raises:
        InvalidArgumentError: ``ranks`` is empty, or has a rank twice or one outside the world.
        PayloadTypeError: ``ranks`` is not a list of ints.
    """
    context = current()
    group = context.add_group(check_ranks(context, ranks))
    group.prepare()
    return group


@fitting
def new_subgroups(group_size: int | None = None) -> tuple[Group, list[Group]]:
    """Make groups of ``group_size`` consecutive ranks; returns this rank's group, and all of them.

    Every rank calls it. None makes a group of each node's ranks.

    >>> mine, groups = ac.new_subgroups(2)            # four ranks: groups of ranks [0, 1] and [2, 3]
    >>> await ac.all_reduce(x, group=mine)

    Raises:
        InvalidArgumentError: the number of ranks is not divisible by ``group_size``.

    Source: ``torch.distributed.new_subgroups``.
    """
    context = current()
    size, ranks = get_nproc_per_node() if group_size is None else integer(group_size), context.world_size
    if size is None or size < 1 or ranks % size:
        raise InvalidArgumentError(
            f"new_subgroups: {ranks} ranks cannot be divided into groups of {group_size!r}; pass a "
            f"group_size that divides {ranks}, or make the groups by ac.new_group"
        )
    groups = [new_group(range(first, first + size)) for first in range(0, ranks, size)]
    return groups[context.rank // size], groups


class session:  # noqa: N801  # read as a statement: `async with ac.session():`
    """A block between ``initialize`` and ``finalize``; the arguments are those of ``initialize``.

    ``async with``, on asyncio or trio, joins and leaves in a thread, so that other tasks of the event loop
    keep running while the ranks wait for each other; ``with`` blocks.

    >>> async with ac.session("gloo", timeout=60):
    ...     total = await ac.all_reduce(x)

    If the block raises, the world is left by ``finalize(abort=True)``: nothing is waited for, and the works
    of other ranks that wait for this one fail with ``PeerLostError``, which says what the block raised.

    A cancellation while joining or leaving takes effect once that is done, at the latest after the timeout.
    (asyncio's ``task.cancel()`` does not wait for the thread: call ``finalize`` before joining again.)
    """

    def __init__(self, backend: str | None = None, **options: Any) -> None:
        self._backend = backend
        self._options = options

    def __enter__(self) -> session:
        initialize(self._backend, **self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(error, abort=is_failure(error))

    async def __aenter__(self) -> session:
        import anyio.to_thread

        of_thread.set(await anyio.to_thread.run_sync(self._joined))
        current().liveness.lives_here()  # the program runs in this thread, not in the one that joined
        actors.current()  # as in initialize, which has recorded only the thread in which it ran
        return self

    def _joined(self) -> Context | None:
        """Join; return a thread rank's context, which is set only in this thread's context variables."""
        self.__enter__()
        return of_thread.get()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import anyio.to_thread

        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.__exit__, kind, error, trace)
        finally:
            of_thread.set(None)

"""Lanes and scopes as a user sees them: ``ac.lane``, ``ac.scope``, ``ac.create_task_group``.

All three are kept in context variables, which child tasks inherit (``host.blocks``).
"""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asynccoll.errors import InvalidArgumentError, still_pending
from asynccoll.host import actors
from asynccoll.host.blocks import Block, Entries, innermost
from asynccoll.host.endings import in_a_line
from asynccoll.host.misfits import fitting
from asynccoll.modes.isolation import Steps
from asynccoll.ops.coalescing import own_block
from asynccoll.order.lane import BACKWARD, DEFAULT
from asynccoll.runtime.process import current, existing
from asynccoll.waiting.together import FirstError
from asynccoll.waiting.work import Members, scopes
from asynccoll.world.group import GroupLike
from asynccoll.world.resolving import resolve_group

if TYPE_CHECKING:
    from anyio.abc import TaskGroup as AnyioTaskGroup
    from typing_extensions import TypeVarTuple, Unpack

    from asynccoll.order.lane import Lane
    from asynccoll.world.context import Context

    Ts = TypeVarTuple("Ts")

_lanes: Entries[str] = ContextVar("asynccoll_lanes", default=())
#: The innermost task group that was entered.
_groups: ContextVar[TaskGroup | None] = ContextVar("asynccoll_task_groups", default=None)


def current_lane() -> str:
    """Return the name of the lane that calls without ``lane=`` use here."""
    return innermost(_lanes) or DEFAULT


class _BackwardLane(str):
    """The name of a lane for gradients, made by ``backward_lane``: the user keeps its calls in order."""

    __slots__ = ()


@fitting
def backward_lane(name: str) -> str:
    """Return the name of the lane ``<name>/backward``: ``lane=ac.backward_lane("gradients")``.

    Any task or thread may issue on it, as backward passes do on autograd's threads. Nothing checks their
    order (no ``LaneOrderError``): the caller has to ensure that all ranks issue in the same order.
    It does not count towards the 32 lanes of a group, and ``close_lane(name)`` closes it, too.

    Raises:
        InvalidArgumentError: ``name`` is not a valid name for a lane.
    """
    return _BackwardLane(checked_name(name) + BACKWARD)


@fitting
def new_lane(kind: str) -> str:
    """Return a new lane name: ``ac.new_lane("metrics")`` is ``"metrics 1"``, then ``"metrics 2"``.

    For objects that need a lane each, however many there are. The names are the same on every rank if all
    ranks request names of a ``kind`` in the same order. Nothing is sent, and the lane is opened when it is
    first used.

    Raises:
        InvalidArgumentError: ``kind`` is not a valid name for a lane.
    """
    named = current().named
    named[checked_name(kind)] += 1
    return f"{kind} {named[kind]}"


def checked_name(name: object) -> str:
    """Return ``name``; refuse one that a user cannot give to a lane."""
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"lane must be a non-empty string, got {name!r}")
    if name.endswith(BACKWARD) and not isinstance(name, _BackwardLane):
        raise InvalidArgumentError(
            f"lane {name!r} is for gradients, where the order of tasks is not checked; choose another "
            "name, or use ac.backward_lane(name) for calls that you keep in order yourself"
        )
    return name


def lane_of(context: Context, group: GroupLike, lane: str | None) -> Lane:
    """Return the lane that a call with these arguments uses."""
    resolved = context.world if group is None else resolve_group(context, group)
    name = current_lane() if lane is None else checked_name(lane)
    return resolved.opened.get(name) or resolved.lane(name)


class lane(Block[str]):  # noqa: N801  # read as a statement: `with ac.lane("eval"):`
    """A block whose collectives run on the lane ``name``: ``with ac.lane("eval"):``, or ``async with``.

    Each lane has its own order of calls: two tasks on two lanes may issue in any order relative to each
    other. Ranks match lanes by name. A group has at most 32 lanes.
    """

    _entries = _lanes

    @fitting
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name: str = checked_name(name)

    def _begin(self) -> str:
        return self.name


@fitting
def close_lane(name: str, *, group: GroupLike = None) -> None:
    """Close the lane ``name`` of ``group``, with its connections and threads. Its name can be used again.

    Every member has to call this equally often, and at the same point among its calls on that lane; it does
    not wait for the others. Operations in flight still complete, and calls that a ``coalescing`` block has
    deferred there are sent first. The connections are closed once every member has called this. Closing a
    lane that this rank has not used is allowed.

    >>> for step in range(1000):
    ...     await ac.all_reduce(x, lane=f"step {step}")
    ...     ac.close_lane(f"step {step}")

    Raises:
        InvalidArgumentError: the name is invalid, or ``default``, which lives as long as its group.
    """
    if checked_name(name) == DEFAULT:
        raise InvalidArgumentError(
            f"the lane {DEFAULT!r} lives as long as its group; close_lane closes other lanes only"
        )
    context = current()
    closed = context.world if group is None else resolve_group(context, group)
    if (block := own_block()) is not None:
        for each in (name, name + BACKWARD):
            if (opened := closed.opened.get(each)) is not None:
                block.flush(opened)
    closed.close_lane(name)


class scope(Block[Members]):  # noqa: N801  # read as a statement: `async with ac.scope():`
    """A block that waits at its end for the works started in it: ``async with ac.scope():``, or ``with``.

    The end also waits for works of child tasks, and raises the errors of works that were not awaited. The
    wait of ``with`` blocks the thread. If the body fails or is cancelled, by anyio, trio or
    ``task.cancel()``, the end still waits, up to each operation's timeout; then the body's own error, or the
    cancellation, is raised. Only Ctrl-C ends the wait (with ``asyncio.run`` the second one: the first cancels
    the task). Works that a child task starts after the block has ended belong to the enclosing scope, if
    there is one.
    """

    _entries = scopes

    def _begin(self) -> Members:
        return Members(innermost(scopes))

    def _end(self, value: Members, error: BaseException | None) -> None:
        first = FirstError(value.errors())
        for work in value.outstanding():
            if not first.is_late_too(work):
                with first:
                    work.wait()
        _raise_first(error, first.error, depth=1)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        import anyio

        left: list[Members] = []
        self.__exit__(kind, error, tb, lambda members, _: left.append(members))
        (members,) = left
        first = FirstError(members.errors())
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            for work in members.outstanding():
                while not first.is_late_too(work):
                    try:
                        with first:
                            await work
                    except asyncio.CancelledError as by_task:  # a shield does not stop task.cancel()
                        cancelled = by_task
                        continue
                    break
        if cancelled is not None and not isinstance(error, asyncio.CancelledError):
            raise cancelled from first.error
        _raise_first(error, first.error)


def _raise_first(error: BaseException | None, first: BaseException | None, *, depth: int = 0) -> None:
    """Raise ``first``, the first error at the end of a scope, unless the block has its own ``error``.

    ``depth``: how many frames are between the caller and the block, apart from the caller's own.
    """
    if first is None:
        return
    if error is None:
        raise first
    if still_pending(first):
        warnings.warn(f"scope left with work outstanding: {first}", RuntimeWarning, stacklevel=3 + depth)


class TaskGroup:
    """A task group in which each child has its own lane, ``parent/name``, and its own torch modes.

    The children may be scheduled in any order on each rank, since ranks match lanes by name. A
    ``with torch.no_grad():`` around awaits in one child does not affect other tasks (``ac.isolated``): a
    child begins in the modes in which it was started.
    ``tg.start_soon(validate, model, name="eval")`` names a child. The name defaults to the function's, and
    further children of one function are ``validate 2``, ``validate 3`` in the order in which the group's task
    starts them.

    A child that fails or is cancelled makes no more calls: other ranks that wait for one get
    ``PeerRefusedError`` within seconds. Successive children of one name are told apart, so that each begins
    in step on all ranks, however many calls the previous one made (``#2 of child task 3`` in errors).

    Names may be new each time: when the first child of a name has ended, its lane is closed in the
    background. From the second child of that name on, the lane stays open until the groups that a task has
    left have had more than eight names; then the lanes of all these names are closed. Calls that are made
    after the child has ended (by a task that outlives it, or a prepared call) need another lane: ``lane=``.
    """

    def __init__(self) -> None:
        self._group: AnyioTaskGroup | None = None
        self._live: set[str] = set()
        self._started: Counter[str] = Counter()  # how many children were started, by function name
        self._ended: dict[str, None] = {}
        self._actor: actors.Actor = None
        self._around: TaskGroup | None = None  # the enclosing group, which another task may have entered
        self._failure = ""  # why the children are cancelled, if the group has failed
        self._parent = DEFAULT

    async def __aenter__(self) -> TaskGroup:
        import anyio

        if self._group is not None:
            raise InvalidArgumentError(
                "this task group has already been entered; each block needs its own: "
                "async with ac.create_task_group() as tg"
            )
        self._parent = current_lane()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._actor = actors.current().actor
        self._around = _groups.get()
        _groups.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._fails(error)
        try:
            return await self._entered().__aexit__(kind, error, trace)
        finally:
            self._group = None
            self._live.clear()
            self._started.clear()
            self._failure = ""
            self._forget()

    def is_of(self, actor: actors.Actor) -> bool:
        """Whether ``actor`` has entered this group and not left it."""
        return self._actor is actor and self._group is not None

    def _forget(self) -> None:
        """After the block, pass the children's names to the outer group, or have their lanes closed."""
        ended, self._ended = self._ended, {}
        actor, self._actor = self._actor, None
        outer, self._around = self._around, None
        _groups.set(outer)
        if outer is not None and outer.is_of(actor):
            outer._ended |= ended
        elif (context := existing()) is not None:
            context.children.left(actor, ended)

    def _fails(self, error: BaseException | None) -> None:
        """Note the first error of the body or a child, for which all children are cancelled."""
        if isinstance(error, Exception) and not self._failure:
            self._failure = in_a_line(error)

    def _why(self) -> str:
        """Return the error for which the children are cancelled; "" if that is not known."""
        return self._failure or ("" if self._around is None else self._around._why())

    def _entered(self) -> AnyioTaskGroup:
        if self._group is None:
            raise InvalidArgumentError(
                "enter the task group first, and start children inside the block: "
                "async with ac.create_task_group() as tg"
            )
        return self._group

    @property
    def cancel_scope(self) -> Any:
        """The cancel scope of the group (anyio's)."""
        return self._entered().cancel_scope

    def start_soon(
        self, function: Callable[[Unpack[Ts]], Awaitable[object]], *args: Unpack[Ts], name: str | None = None
    ) -> None:
        """Start ``function(*args)`` as a child on the lane ``parent/name``, in torch's current modes.

        ``function`` is an async function, a ``functools.partial`` of one, an object with an async
        ``__call__``, or any other callable that returns an awaitable.

        Raises:
            InvalidArgumentError: a child of that name is still running, the name cannot be part of a lane's
                name, ``function`` is not an async function, or the group has not been entered (a
                ``ValueError``).
        """
        group = self._entered()
        _check_function(function)
        chosen = self._numbered(_name_of(function)) if name is None else name
        if not isinstance(chosen, str) or not chosen or "/" in chosen or "/" + chosen == BACKWARD:
            raise InvalidArgumentError(
                f"a child cannot be named {chosen!r}: a name is a non-empty string without '/', and "
                "'backward' is the lane of gradients; pass another name="
            )
        own = f"{self._parent}/{chosen}"
        if own in self._live:
            raise InvalidArgumentError(
                f"a child named {chosen!r} is still running in this task group; the calls of two on one "
                "lane could be mixed up between ranks: pass another name="
            )
        with lane(own):
            child = Steps(_coroutine(function, args))
        self._live.add(own)  # first: an eager task factory runs the child in start_soon, perhaps to its end
        group.start_soon(self._run, own, child, name=own)

    def _numbered(self, name: str) -> str:
        """Return the name of the next child of a function called ``name``.

        The name must not depend on whether the previous child has ended, since that differs between ranks.
        Children that another task starts are not numbered, since the order of several tasks differs, too.
        """
        if not self.is_of(actors.current().actor):
            return name
        self._started[name] += 1
        return name if self._started[name] == 1 else f"{name} {self._started[name]}"

    async def _run(self, own: str, child: Steps) -> None:
        failed: BaseException | None = None
        try:
            with lane(own):
                await child
        except BaseException as error:
            failed = error
            self._fails(error)
            raise
        finally:
            self._live.discard(own)
            self._ended[own] = None
            if (context := existing()) is not None:
                context.children.ended(own, failed, self._why())
            failed = None  # else the error and this frame would keep each other alive


def _check_function(function: object) -> None:
    """Refuse a coroutine, and anything that cannot be called."""
    if isinstance(function, Coroutine):
        function.close()
        called = getattr(function, "__qualname__", "function")
        raise InvalidArgumentError(
            "start_soon takes an async function and its arguments, got a coroutine: write "
            f"start_soon({called}, ...) instead of start_soon({called}(...))"
        )
    if not callable(function):
        raise InvalidArgumentError(
            f"start_soon takes an async function and its arguments, got {type(function).__name__}"
        )


def _name_of(function: object) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _coroutine(
    function: Callable[..., object], args: tuple[object, ...]
) -> Coroutine[object, object, object]:
    made = function(*args)
    if isinstance(made, Coroutine):
        return made
    if isinstance(made, Awaitable):
        return _awaiting(made)
    raise InvalidArgumentError(
        f"start_soon takes an async function; {_name_of(function)} has returned {type(made).__name__}, which "
        "cannot be awaited: call it directly, or through anyio.to_thread.run_sync if it blocks"
    )


async def _awaiting(made: Awaitable[object]) -> object:
    return await made


def create_task_group() -> TaskGroup:
    """Return a ``TaskGroup``: ``async with ac.create_task_group() as tg: tg.start_soon(validate, model)``.

    It is anyio's task group, on asyncio and trio: the end of the block waits for the children, and if one
    fails, the others are cancelled and an exception group is raised. In addition, each child has its own
    lane, so that children may be scheduled in any order on each rank, and its own torch modes (``no_grad``).

    >>> async with ac.create_task_group() as tg:
    ...     tg.start_soon(train, model)
    ...     tg.start_soon(validate, copy.deepcopy(model), name="eval")

    If a child fails on one rank only, it is not cancelled on the others: there its next call raises
    ``PeerRefusedError``, which names that rank and the child's error. If ranks should continue after an
    error, catch it inside the child, and agree on what to do: ``await ac.all_reduce(ok, op="and")``.
    """
    return TaskGroup()

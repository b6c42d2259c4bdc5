"""Lanes and scopes as a user sees them: ``ac.lane``, ``ac.scope``, ``ac.create_task_group``.

All three are context values: child tasks inherit them, and leaving one restores what was there by
assignment, so that async generators, which may be closed in another context, survive.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError
from asynccoll.lane import DEFAULT
from asynccoll.work import Members, scope_members

if TYPE_CHECKING:
    from anyio.abc import TaskGroup as AnyioTaskGroup

__all__ = ["TaskGroup", "create_task_group", "current_lane", "lane", "scope"]

_lane_name: ContextVar[str] = ContextVar("asynccoll_lane", default=DEFAULT)
current_lane = _lane_name.get


class lane:  # noqa: N801  # read as a statement: `with ac.lane("eval"):`
    """Collectives inside run on the lane ``name``: ``with ac.lane("eval"):``, or ``async with``.

    A lane is an order of its own: two tasks on two lanes may issue in any order relative to each other.
    Ranks meet by the lane's name. At most 32 per group.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"lane must be a non-empty string, got {name!r}")
        self.name = name
        self._before: list[str] = []

    def __enter__(self) -> lane:
        self._before.append(_lane_name.get())
        _lane_name.set(self.name)
        return self

    def __exit__(self, *exc: object) -> None:
        _lane_name.set(self._before.pop())

    async def __aenter__(self) -> lane:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()


class scope:  # noqa: N801  # read as a statement: `async with ac.scope():`
    """A block that is not left with work outstanding: ``async with ac.scope():`` (or ``with``, which blocks).

    Works that were started inside, by child tasks too, are waited for at the end; those nobody awaited
    raise their errors there. When the block fails or is cancelled, the waiting is shielded from
    cancellation, up to each operation's timeout, and the block's own error wins.
    """

    def __init__(self) -> None:
        self._before: Members | None = None
        self._members = Members()

    def __enter__(self) -> scope:
        self._before = scope_members.get()
        self._members = Members()
        scope_members.set(self._members)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        scope_members.set(self._before)
        told = self._members.errors()
        first: BaseException | None = None
        for work in self._members.outstanding():
            try:
                work.wait()
            except Exception as failed:
                first = first or _unless_told(failed, told)
        self._leave(error, first)

    async def __aenter__(self) -> scope:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        import anyio

        scope_members.set(self._before)
        told = self._members.errors()
        first: BaseException | None = None
        with anyio.CancelScope(shield=True):
            for work in self._members.outstanding():
                try:
                    await work
                except Exception as failed:
                    first = first or _unless_told(failed, told)
        self._leave(error, first)

    def _leave(self, error: BaseException | None, first: BaseException | None) -> None:
        self._members = Members()
        if first is None:
            return
        if error is None:
            raise first
        if isinstance(first, CollectiveTimeoutError):
            warnings.warn(f"scope left with work outstanding: {first}", RuntimeWarning, stacklevel=3)


def _unless_told(error: Exception, told: list[BaseException]) -> Exception | None:
    """``error``, if nobody got it from another work of the same operation (one that this was mapped to)."""
    return None if any(error is one for one in told) else error


class TaskGroup:
    """A task group whose children each have a lane of their own, ``parent/name``.

    Concurrent code is right by construction: the children may be scheduled in any order on each rank, for
    ranks meet by name. ``tg.start_soon(validate, model, name="eval")``; the name defaults to the function's.
    """

    def __init__(self) -> None:
        self._group: AnyioTaskGroup | None = None
        self._live: set[str] = set()
        self._parent = DEFAULT

    async def __aenter__(self) -> TaskGroup:
        import anyio

        self._parent = current_lane()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> bool | None:
        assert self._group is not None
        return await self._group.__aexit__(*exc)  # type: ignore[arg-type]  # what `async with` passes

    @property
    def cancel_scope(self) -> Any:
        """The cancel scope of the group (anyio's)."""
        assert self._group is not None
        return self._group.cancel_scope

    def start_soon(
        self, function: Callable[..., Awaitable[Any]], *args: Any, name: str | None = None
    ) -> None:
        """Start ``function(*args)`` as a child on the lane ``parent/name``.

        Raises:
            InvalidArgumentError: a child of that name is still running (a ``ValueError``).
        """
        assert self._group is not None, "enter the task group first: async with ac.create_task_group() as tg"
        chosen = name if name is not None else getattr(function, "__name__", "child")
        own = f"{self._parent}/{chosen}"
        if own in self._live:
            raise InvalidArgumentError(
                f"a child named {chosen!r} is still running in this task group; two of them on one lane "
                "could cross between ranks: pass another name="
            )
        self._live.add(own)
        self._group.start_soon(self._run, own, function, args, name=own)

    async def _run(self, own: str, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        try:
            with lane(own):
                await function(*args)
        finally:
            self._live.discard(own)


def create_task_group() -> TaskGroup:
    """``async with ac.create_task_group() as tg: tg.start_soon(train); tg.start_soon(validate)``."""
    return TaskGroup()

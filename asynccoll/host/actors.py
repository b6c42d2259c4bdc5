"""Who is calling: an asyncio task, a trio task, or a plain thread, whom it descends from, who runs beside it.

A lane belongs to the actor that issued on it last; this module answers whether another may follow. What
orders two actors is that one was started by the other, or when the other had ended. Calls are numbered in the
process, and a context tells the last one made in it: so it is known which of its parent's calls came before a
child.
Tasks are looked up in the event loops' own tables. A thread is stood for by an object that lives in
its context: the worker of a pool, which never ends, runs each job in a copy of the submitter's
context, and with that copy its actor ends.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from asynccoll import host

__all__ = [
    "Actor",
    "Descent",
    "asyncio_task",
    "beside",
    "called",
    "current",
    "ended",
    "label",
    "left",
    "started_after",
    "trio_task",
]

Actor = object  # an asyncio.Task, a trio.lowlevel.Task or a _ThreadActor: compared by identity

_running_loop = asyncio._get_running_loop
# Before 3.12 asyncio.current_task is Python and three times dearer than the table it reads.
asyncio_task: Callable[[Any], asyncio.Task[object] | None] = (
    asyncio.current_task if sys.version_info >= (3, 12) else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # private, and stable there
)


class _ThreadActor:
    """A thread, or one job of a pooled thread: alive as long as its context is."""

    __slots__ = ("__weakref__", "ident", "name", "thread")

    def __init__(self, thread: host.Thread) -> None:
        self.thread = thread
        self.ident = host.get_ident()
        self.name = thread.name


class Descent(NamedTuple):
    """An actor that has issued something, and the one whose context it inherited."""

    actor: Actor
    parent: Descent | None
    #: The last call in that context before it was inherited.
    after: int


_descent: ContextVar[Descent | None] = ContextVar("asynccoll_descent", default=None)
_calls = itertools.count(1)  # only grows: nobody's state
_last_call: ContextVar[int] = ContextVar("asynccoll_last_call", default=0)


def called() -> int:
    """The number of a call that is made now; who is started from here on comes after it."""
    number = next(_calls)
    _last_call.set(number)
    return number


def trio_task() -> Any:
    """The current trio task, or None; trio is looked at only where somebody imported it."""
    trio = sys.modules.get("trio")
    if trio is None:
        return None
    try:
        return trio.lowlevel.current_task()
    except (RuntimeError, AttributeError):
        return None


def current() -> Descent:
    """The running actor, and the line it descends from; recorded for its children to inherit."""
    node = _descent.get()
    loop = _running_loop()
    task = asyncio_task(loop) if loop is not None else None
    if task is None and "trio" in sys.modules:
        task = trio_task()
    if node is not None:
        actor = node.actor
        if actor is task:
            return node
        if task is None and type(actor) is _ThreadActor and actor.ident == host.get_ident():
            return node
        node = node._replace(parent=_alive(node.parent))
    actor = task if task is not None else _ThreadActor(host.current_thread())
    node = Descent(actor, node, _last_call.get())
    _descent.set(node)
    return node


def _alive(node: Descent | None) -> Descent | None:
    """The line is kept as long as it matters, not as long as it was."""
    while node is not None and ended(node.actor):
        node = node.parent
    return node


def started_after(node: Descent, ancestor: Actor) -> int | None:
    """The last call of ``ancestor`` before it started ``node``, or an ancestor of that; None: it did not."""
    below = node
    while below.parent is not None:
        if below.parent.actor is ancestor:
            return below.after
        below = below.parent
    return None


def beside(node: Descent) -> weakref.WeakSet[Any]:
    """The tasks that are there already, and cannot have started that of ``node``."""
    line = {id(one.actor) for one in _line(node)}
    loop = _running_loop()
    if loop is not None and asyncio_task(loop) is node.actor:
        found = _asyncio_tasks_beside(
            node.actor, [one for one in asyncio.all_tasks(loop) if id(one) not in line]
        )
        if found and "anyio" in sys.modules:
            line.update(_starters_by_anyio(node.actor))
        return weakref.WeakSet(task for task in found if id(task) not in line)
    if not isinstance(node.actor, _ThreadActor):
        line.update(map(id, _starters_by_trio(node.actor)))
        return weakref.WeakSet(task for task in _trio_tasks() if id(task) not in line)
    return weakref.WeakSet()


def _asyncio_tasks_beside(task: Any, others: list[Any]) -> list[Any]:
    """Of ``others`` those that cannot have started ``task``, as far as their names tell.

    asyncio does not tell who started a task, but it numbers those that nobody names. Of two such only the
    older can have started the other; of one with and one without a name the loop's first task can, or else
    the one with; of two that were named neither. So where ranks run two tasks in different order, one of
    the ranks has the one beside the other that it follows there.
    """
    numbers = {one: _number(one) for one in others}
    mine = _number(task)
    if mine is None:
        first = min((number for number in numbers.values() if number is not None), default=None)
        return [one for one, number in numbers.items() if number != first or number is None]
    return [one for one, number in numbers.items() if number is not None and number > mine]


def _line(node: Descent | None) -> Iterator[Descent]:
    while node is not None:
        yield node
        node = node.parent


def _number(task: Any) -> int | None:
    """The place among all tasks of one that asyncio has named."""
    kind, _, number = task.get_name().partition("-")
    return int(number) if kind == "Task" and number.isdecimal() else None


def _starters_by_anyio(task: Any) -> Iterator[int]:
    """The identity of whose task group started ``task``, of whose started that, and so on."""
    import anyio

    parents = {info.id: info.parent_id for info in anyio.get_running_tasks()}
    parent = parents.get(id(task))
    while parent is not None:
        yield parent
        parent = parents.get(parent)


def _starters_by_trio(task: Any) -> Iterator[Any]:
    while task.parent_nursery is not None:
        task = task.parent_nursery.parent_task
        yield task


def _trio_tasks() -> Iterator[Any]:
    """All tasks of this thread's trio."""
    import trio

    root = trio.lowlevel.current_root_task()
    left = [root] if root is not None else []
    while left:
        task = left.pop()
        yield task
        for nursery in task.child_nurseries:
            left.extend(nursery.child_tasks)


def ended(actor: Actor) -> bool:
    """Whether ``actor`` can issue nothing more."""
    if isinstance(actor, _ThreadActor):
        return not actor.thread.is_alive()
    done = getattr(actor, "done", None)
    if done is not None:
        return bool(done())
    coroutine = getattr(actor, "coro", None)
    return coroutine is None or getattr(coroutine, "cr_frame", None) is None


def left(actor: Actor, file: str) -> bool:
    """Whether ``actor`` is a thread that no longer runs anything of ``file``, where it issued.

    A pool may keep a job's context until the next one comes; its stack tells that the job is over.
    """
    if not isinstance(actor, _ThreadActor):
        return False
    frame = sys._current_frames().get(actor.ident)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is None


def label(actor: Actor) -> str:
    """``task 'Task-3'`` or ``thread 'MainThread'``, for messages."""
    if isinstance(actor, _ThreadActor):
        return f"thread {actor.name!r}"
    name = actor.get_name() if hasattr(actor, "get_name") else getattr(actor, "name", "?")
    return f"task {name!r}"

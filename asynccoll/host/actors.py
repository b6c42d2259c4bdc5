"""*Actors*, which call operations (asyncio tasks, trio tasks, plain threads), and their ancestors.

A lane belongs to the actor that issued on it last, and another actor may follow only if their order is
certain. Calls are numbered within the process, and a context (``contextvars``) holds the number of the last
call made in it. A child inherits that number, so it is known which of its parent's calls came before it.

Tasks are looked up in the event loops' own tables, and held weakly: a task holds its context, so a context
that held the task would keep both alive, with the task's result, until a garbage collection. A thread is
represented by an object in its context: a pool's worker, which never ends, runs each job in a copy of the
submitter's context, and the job's actor ends with that copy.
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

Actor = object  # a _TaskActor or a _ThreadActor: compared by identity

_running_loop = asyncio._get_running_loop
# Before 3.12 asyncio.current_task is written in Python, and three times slower than the table that it reads.
asyncio_task: Callable[[Any], asyncio.Task[object] | None] = (
    asyncio.current_task if sys.version_info >= (3, 12) else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # private, and stable there
)


class _TaskActor:
    """A task of asyncio or trio."""

    __slots__ = ("__weakref__", "task")

    def __init__(self, task: Any) -> None:
        self.task = weakref.ref(task)


class _ThreadActor:
    """A thread, or one job of a pooled thread: alive as long as its context is."""

    __slots__ = ("__weakref__", "ident", "name", "thread")

    def __init__(self, thread: host.Thread) -> None:
        self.thread = thread
        self.ident = host.get_ident()
        self.name = thread.name

    def task(self) -> None:
        """Return None: a thread is not a task."""


class Descent(NamedTuple):
    """An actor that has issued something, and the actors that it descends from."""

    actor: Actor
    #: The descent of the actor whose context this one inherited.
    parent: Descent | None
    #: The number of the last call made in that context before it was inherited.
    after: int


_descent: ContextVar[Descent | None] = ContextVar("asynccoll_descent", default=None)
_calls = itertools.count(1)  # only grows, and has no state of a rank
_last_call: ContextVar[int] = ContextVar("asynccoll_last_call", default=0)
#: Actors by task, since a task may run code in several contexts.
_of_tasks: weakref.WeakKeyDictionary[Any, _TaskActor] = weakref.WeakKeyDictionary()


def called() -> int:
    """Assign a number to a call made now, and return it; actors started from here on come after the call."""
    number = next(_calls)
    _last_call.set(number)
    return number


def trio_task() -> Any:
    """Return the current trio task, or None; also None if trio has not been imported."""
    trio = sys.modules.get("trio")
    if trio is None:
        return None
    try:
        return trio.lowlevel.current_task()
    except (RuntimeError, AttributeError):
        return None


def current() -> Descent:
    """Return the running actor and its ancestors, and record them in the context for the actor's children."""
    node = _descent.get()
    loop = _running_loop()
    task = asyncio_task(loop) if loop is not None else None
    if task is None and "trio" in sys.modules:
        task = trio_task()
    if node is not None:
        actor: Any = node.actor
        if actor.task() is task and (
            task is not None or (type(actor) is _ThreadActor and actor.ident == host.get_ident())
        ):
            return node
        node = _shortened(node)
    new = of_task(task) if task is not None else _ThreadActor(host.current_thread())
    node = Descent(new, node, _last_call.get())
    _descent.set(node)
    return node


def of_task(task: Any) -> Actor:
    """Return the actor of ``task``."""
    found = _of_tasks.get(task)
    return found if found is not None else _of_tasks.setdefault(task, _TaskActor(task))


def _shortened(node: Descent) -> Descent:
    """Drop the nearest ancestors of ``node`` that have ended, so that lines do not grow forever."""
    while node.parent is not None and ended(node.parent.actor):
        node = node._replace(parent=node.parent.parent, after=node.parent.after)
    return node


def started_after(node: Descent, ancestor: Actor) -> int | None:
    """Return the number of ``ancestor``'s last call before it started ``node`` or an ancestor of ``node``.

    None if it has started none of them.
    """
    for below in line(node):
        if below.parent is not None and below.parent.actor is ancestor:
            return below.after
    return None


def line(node: Descent | None) -> Iterator[Descent]:
    """Yield ``node``, its parent, and so on."""
    while node is not None:
        yield node
        node = node.parent


def thread_of(actor: Actor) -> host.Thread | None:
    """Return the thread that ``actor`` is, or is a job of; None for a task."""
    return actor.thread if isinstance(actor, _ThreadActor) else None


def task_of(actor: Actor) -> Any:
    """Return the task that ``actor`` is; None for a thread, and once the task is gone."""
    return actor.task() if isinstance(actor, _TaskActor) else None


def ended(actor: Actor) -> bool:
    """Whether ``actor`` has ended and cannot issue anything more."""
    if isinstance(actor, _ThreadActor):
        return not actor.thread.is_alive()
    task = task_of(actor)
    done = getattr(task, "done", None)
    if done is not None:
        return bool(done())
    coroutine = getattr(task, "coro", None)
    return coroutine is None or getattr(coroutine, "cr_frame", None) is None


def left(actor: Actor, file: str) -> bool:
    """Whether ``actor`` is a thread that no longer runs any code of ``file``, where it issued.

    A pool may keep a job's context until the next job; the thread's stack shows that the job is over.
    """
    if not isinstance(actor, _ThreadActor):
        return False
    frame = sys._current_frames().get(actor.ident)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is None


def label(actor: Actor) -> str:
    """Name ``actor`` for messages: ``task 'Task-3' (main)`` or ``thread 'MainThread'``."""
    if isinstance(actor, _ThreadActor):
        return f"thread {actor.name!r}"
    task = task_of(actor)
    if not hasattr(task, "get_name"):
        return f"task {getattr(task, 'name', '?')!r}"
    runs = getattr(task.get_coro(), "__qualname__", "").replace("<locals>.", "")
    return f"task {task.get_name()!r}{f' ({runs})' if runs else ''}"

"""Who is calling: an asyncio task, a trio task, or a plain thread, whom it descends from, who runs beside it.

A lane belongs to the actor that issued on it last; this module answers whether another may follow. What
orders two actors is that one was started by the other, or when the other had ended. Calls are numbered in the
process, and a context tells the last one made in it: so it is known which of its parent's calls came before a
child.
Tasks are looked up in the event loops' own tables, and who waits for one in its callbacks. A thread is
stood for by an object that lives in its context: the worker of a pool, which never ends, runs each job in a
copy of the submitter's context, and with that copy its actor ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
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
    "ran_beside",
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
        node = _shortened(node)
    actor = task if task is not None else _ThreadActor(host.current_thread())
    node = Descent(actor, node, _last_call.get())
    _descent.set(node)
    return node


def _shortened(node: Descent) -> Descent:
    """The line is kept as long as it matters, not as long as it was."""
    while node.parent is not None and ended(node.parent.actor):
        node = node._replace(parent=node.parent.parent, after=node.parent.after)
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
    """The tasks that are there already, and can neither have started that of ``node`` nor wait for it."""
    loop, task = _running_loop(), node.actor
    if isinstance(task, _ThreadActor):
        return weakref.WeakSet()
    tasks = list(_trio_tasks()) if loop is None else list(asyncio.all_tasks(loop))
    waiters = _waiters(tasks)
    above, tops = {id(task)}, []
    found = [task]
    for one in found:  # grows
        waiting = waiters(one)
        if not waiting:
            tops.append(one)
        found.extend(other for other in waiting if id(other) not in above)
        above.update(map(id, waiting))
    known = above.union(id(one.actor) for one in _line(node))
    first = min((number for one in tasks if (number := _number(one)) is not None), default=None)
    # Nobody has started the first; but of a task that nobody waits for, its number is all that is known.
    tops = [top for top in tops if top is task or first is None or _number(top) != first]
    return weakref.WeakSet(
        one
        for one in tasks
        if id(one) not in known
        and not (_may_start(one, task, first) and any(_may_start(one, top, first) for top in tops))
    )


def ran_beside(node: Descent, others: AbstractSet[Any]) -> bool:
    """Whether that of ``node`` is one of ``others``, or was started by one, or only they wait for it."""
    if not others:
        return False
    these = {id(one) for one in others}
    if any(id(one.actor) in these for one in _line(node)):
        return True
    if isinstance(node.actor, _ThreadActor):
        return False
    waiters, found, seen = _waiters(list(others)), [node.actor], these
    while found:
        above = waiters(found.pop())
        if not above:
            return False
        found.extend(one for one in above if id(one) not in seen)
        seen.update(map(id, above))
    return True


def _may_start(one: Any, task: Any, first: int | None) -> bool:
    """Whether ``one`` can have started ``task``, as far as their names tell.

    asyncio does not tell who started a task, but it numbers those that nobody names. Of two such only the
    older can have started the other; of one with and one without a name the loop's first task can, or else
    the one with; of two that were named neither. So where ranks run two tasks in different order, one of
    the ranks has the one beside the other that it follows there.
    """
    number, other = _number(one), _number(task)
    if number is None:
        return other is not None
    return number == first or (other is not None and number < other)


def _line(node: Descent | None) -> Iterator[Descent]:
    while node is not None:
        yield node
        node = node.parent


def _number(task: Any) -> int | None:
    """The place among all tasks of one that asyncio has named."""
    if not isinstance(task, asyncio.Task):
        return None
    kind, _, number = task.get_name().partition("-")
    return int(number) if kind == "Task" and number.isdecimal() else None


def _waiters(tasks: list[Any]) -> Callable[[Any], list[Any]]:
    """A function that tells who waits for a task, as far as that is known; of all in ``tasks`` it is."""
    parents = _parents_by_anyio(tasks) if "anyio" in sys.modules and _running_loop() is not None else {}

    def waiters(task: Any) -> list[Any]:
        if not isinstance(task, asyncio.Task):
            return [task.parent_nursery.parent_task] if task.parent_nursery is not None else []
        found = _waiting_for(task)
        parent = parents.get(id(task))
        return found if parent is None else [*found, parent]

    return waiters


def _parents_by_anyio(tasks: list[Any]) -> dict[int, Any]:
    """By a task's identity that whose task group has started it."""
    import anyio

    known = {id(one): one for one in tasks}
    return {info.id: known[info.parent_id] for info in anyio.get_running_tasks() if info.parent_id in known}


def _waiting_for(task: Any) -> list[Any]:
    """The asyncio tasks that wait for ``task``: by await, gather, wait, wait_for, shield, or in a TaskGroup.

    Its callbacks tell. One resumes the waiter itself, or sets a future that this waits for.
    """
    found, futures = [], [task]
    for future in futures:  # grows
        for callback, _ in future._callbacks or ():
            for one in _held_by(callback):
                if isinstance(one, asyncio.Task):
                    if one is not task:  # anyio's callback of a task knows this task
                        found.append(one)
                elif asyncio.isfuture(one) and one not in futures:
                    futures.append(one)
    return found


def _held_by(callback: Any) -> Iterator[Any]:
    """The objects that a callback is bound to, is given, or has in its scope."""
    bound = getattr(callback, "__self__", None)
    yield bound
    yield getattr(bound, "_parent_task", None)  # of an asyncio.TaskGroup
    yield from getattr(callback, "args", ())  # of a functools.partial
    for cell in getattr(callback, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing in it yet
            yield cell.cell_contents


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

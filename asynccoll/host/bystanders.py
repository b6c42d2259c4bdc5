"""Who runs beside a task or thread: who was there when it came, and neither started it nor waits for it.

Ranks may run such tasks in different order. trio and anyio tell who started a task. asyncio does not; but who
waits for one stands in its callbacks, and the names that asyncio gives are numbered. What this reads there is
private; where a Python has it no more, numbers alone decide, and more is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from asynccoll.host import actors

__all__ = ["beside", "ran_beside"]


def beside(node: actors.Descent) -> weakref.WeakSet[Any]:
    """The tasks that are there already, and can neither have started that of ``node`` nor wait for it.

    Where that is a thread: the threads.
    """
    task = node.actor
    if (thread := actors.thread_of(task)) is not None:
        return weakref.WeakSet(_younger(thread))
    tasks = list(_trio_tasks() if _is_of_trio(task) else asyncio.all_tasks())
    line = {id(one.actor) for one in actors.line(node)}
    if all(id(one) in line for one in tasks):
        return weakref.WeakSet()
    waiters = _waiters(tasks)
    above, tops = {id(task)}, []
    found = [task]
    for one in found:  # grows
        waiting = waiters(one)
        if not waiting:
            tops.append(one)
        found.extend(other for other in waiting if id(other) not in above)
        above.update(map(id, waiting))
    known = above | line
    first = min((number for one in tasks if (number := _number(one)) is not None), default=None)
    # Nobody has started the first; but of a task that nobody waits for, its number is all that is known.
    tops = [top for top in tops if top is task or first is None or _number(top) != first]
    return weakref.WeakSet(
        one
        for one in tasks
        if id(one) not in known
        and not (_may_start(one, task, first) and any(_may_start(one, top, first) for top in tops))
    )


def ran_beside(node: actors.Descent, others: AbstractSet[Any]) -> bool:
    """Whether that of ``node`` is one of ``others``, or was started by one, or only they wait for it."""
    if not others:
        return False
    these = {id(one) for one in others}
    if any(
        id(one) in these
        for above in actors.line(node)
        for one in (above.actor, actors.thread_of(above.actor))
    ):
        return True
    if any(isinstance(one, threading.Thread) for one in (*others, actors.thread_of(node.actor))):
        return False
    waiters, found, seen = _waiters(list(others)), [node.actor], these
    while found:
        above = waiters(found.pop())
        if not above:
            return False
        found.extend(one for one in above if id(one) not in seen)
        seen.update(map(id, above))
    return True


def _younger(thread: Any) -> list[Any]:
    """The threads that were started later: none of them has started this one."""
    running = threading.enumerate()  # in the order in which they were started
    return running[running.index(thread) + 1 :] if thread in running else []


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


def _is_of_trio(task: Any) -> bool:
    return hasattr(task, "parent_nursery")


def _number(task: Any) -> int | None:
    """The place among all tasks of one that asyncio has named."""
    if not isinstance(task, asyncio.Task):
        return None
    kind, _, number = task.get_name().partition("-")
    return int(number) if kind == "Task" and number.isdecimal() else None


def _waiters(tasks: list[Any]) -> Callable[[Any], list[Any]]:
    """A function that tells who waits for a task, as far as that is known; of all in ``tasks`` it is."""
    ours = [one for one in tasks if not _is_of_trio(one)]  # trio tells itself
    parents = _parents_by_anyio(ours) if ours and "anyio" in sys.modules else {}

    def waiters(task: Any) -> list[Any]:
        if _is_of_trio(task):
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
        for callback, _ in getattr(future, "_callbacks", None) or ():
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

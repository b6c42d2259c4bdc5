"""Which tasks or threads run *beside* an actor: they already existed, and neither started it nor wait for it.

Ranks may run such tasks in different orders. trio and anyio record which task started another. asyncio does
not, but a task's callbacks show which tasks wait for it, and asyncio's default task names are numbered. The
attributes read here are private; in a Python that lacks them only the numbers decide, and more is refused.
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


def beside(node: actors.Descent) -> weakref.WeakSet[Any]:
    """Return the existing tasks, as actors, that can neither have started ``node``'s task nor wait for it.

    If the actor of ``node`` is a thread, return the threads that were started later.
    """
    if (thread := actors.thread_of(node.actor)) is not None:
        return weakref.WeakSet(_younger(thread))
    task = actors.task_of(node.actor)
    tasks = list(_trio_tasks() if _is_of_trio(task) else asyncio.all_tasks())
    line = {id(one) for above in actors.line(node) if (one := actors.task_of(above.actor)) is not None}
    if all(id(one) in line for one in tasks):
        return weakref.WeakSet()
    waiters = _waiters(tasks)
    # All tasks that wait for ``task``, directly or through others, and those of them that no task waits for.
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
    # No task started the first one. Of any other task that no task waits for, only the number is known.
    tops = [top for top in tops if top is task or first is None or _number(top) != first]
    return weakref.WeakSet(
        actors.of_task(one)
        for one in tasks
        if id(one) not in known
        and not (_may_start(one, task, first) and any(_may_start(one, top, first) for top in tops))
    )


def ran_beside(node: actors.Descent, others: AbstractSet[Any]) -> bool:
    """Whether ``node``'s actor is one of ``others``, descends from one, or is waited for only by them."""
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
    tasks = [task for one in others if (task := actors.task_of(one)) is not None]
    waiters, found, seen = _waiters(tasks), [actors.task_of(node.actor)], set(map(id, tasks))
    while found:
        above = waiters(found.pop())
        if not above:
            return False
        found.extend(one for one in above if id(one) not in seen)
        seen.update(map(id, above))
    return True


def _younger(thread: Any) -> list[Any]:
    """Return the threads that were started after ``thread``: none of them can have started it."""
    running = threading.enumerate()  # in the order in which they were started
    return running[running.index(thread) + 1 :] if thread in running else []


def _may_start(one: Any, task: Any, first: int | None) -> bool:
    """Whether ``one`` can have started ``task``, judging by their names.

    asyncio does not record which task started another, but it numbers tasks that were not given a name. A
    numbered task can have started younger numbered tasks, and a named task only if it is the loop's ``first``
    task. A named task can have started any numbered task, but no named one. So if ranks run two tasks in
    different orders, the second task counts as running beside the first on at least one of the ranks.
    """
    number, other = _number(one), _number(task)
    if number is None:
        return other is not None
    return number == first or (other is not None and number < other)


def _is_of_trio(task: Any) -> bool:
    return hasattr(task, "parent_nursery")


def _number(task: Any) -> int | None:
    """Return the number in a name given by asyncio; None for any other task."""
    if not isinstance(task, asyncio.Task):
        return None
    kind, _, number = task.get_name().partition("-")
    return int(number) if kind == "Task" and number.isdecimal() else None


def _waiters(tasks: list[Any]) -> Callable[[Any], list[Any]]:
    """Return a function that returns the tasks that wait for a task, as far as they are known.

    Of anyio's task groups it knows those whose parent task is in ``tasks``.
    """
    ours = [one for one in tasks if not _is_of_trio(one)]  # trio records the parents itself
    parents = _parents_by_anyio(ours) if ours and "anyio" in sys.modules else {}

    def waiters(task: Any) -> list[Any]:
        if _is_of_trio(task):
            return [task.parent_nursery.parent_task] if task.parent_nursery is not None else []
        found = _waiting_for(task)
        parent = parents.get(id(task))
        return found if parent is None else [*found, parent]

    return waiters


def _parents_by_anyio(tasks: list[Any]) -> dict[int, Any]:
    """Map the id of each task to the task whose task group started it."""
    import anyio

    known = {id(one): one for one in tasks}
    return {info.id: known[info.parent_id] for info in anyio.get_running_tasks() if info.parent_id in known}


def _waiting_for(task: Any) -> list[Any]:
    """Return the asyncio tasks that wait for ``task``: by await, gather, wait, wait_for, shield or TaskGroup.

    The task's callbacks show them: each resumes a waiter, or sets a future that the waiter waits for.
    """
    found, futures = [], [task]
    for future in futures:  # grows
        for callback, _ in getattr(future, "_callbacks", None) or ():
            for one in _held_by(callback):
                if isinstance(one, asyncio.Task):
                    if one is not task:  # anyio's callback of a task refers to that same task
                        found.append(one)
                elif asyncio.isfuture(one) and one not in futures:
                    futures.append(one)
    return found


def _held_by(callback: Any) -> Iterator[Any]:
    """Yield the objects that a callback is bound to, is passed, or closes over."""
    bound = getattr(callback, "__self__", None)
    yield bound
    yield getattr(bound, "_parent_task", None)  # of an asyncio.TaskGroup
    yield from getattr(callback, "args", ())  # of a functools.partial
    for cell in getattr(callback, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents


def _trio_tasks() -> Iterator[Any]:
    """Yield all tasks of the trio run in this thread."""
    import trio

    root = trio.lowlevel.current_root_task()
    left = [root] if root is not None else []
    while left:
        task = left.pop()
        yield task
        for nursery in task.child_nurseries:
            left.extend(nursery.child_tasks)

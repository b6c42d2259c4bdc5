"""Who is calling: an asyncio task, a trio task, or a plain thread, and whom it descends from.

A lane belongs to the actor that issued on it last; this module answers whether another may follow.
The tables used here are the event loops' own; a context variable alone is no identity, for children
inherit it, and that inheritance is just what tells descent.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import ContextVar
from typing import Any, NamedTuple

__all__ = ["Actor", "ancestry", "current_actor", "ended", "label"]

Actor = Any  # an asyncio.Task, a trio.lowlevel.Task or a threading.Thread: compared by identity

_running_loop = asyncio._get_running_loop
# Before 3.12 asyncio.current_task is Python and three times dearer than the table it reads.
_asyncio_task = (
    asyncio.current_task
    if sys.version_info >= (3, 12)
    else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # private, and stable there
)
_current_thread = threading.current_thread


class Descent(NamedTuple):
    """An actor that has issued something, and the one whose context it inherited."""

    actor: Actor
    parent: Descent | None


_descent: ContextVar[Descent | None] = ContextVar("asynccoll_descent", default=None)


def trio_task() -> Any:
    """The current trio task, or None; trio is looked at only where somebody imported it."""
    trio = sys.modules.get("trio")
    if trio is None:
        return None
    try:
        return trio.lowlevel.current_task()
    except (RuntimeError, AttributeError):
        return None


def current_actor() -> Actor:
    """The task that is running, else the thread."""
    loop = _running_loop()
    if loop is not None:
        task = _asyncio_task(loop)
        if task is not None:
            return task
    return trio_task() or _current_thread()


def ancestry(actor: Actor) -> Descent:
    """The line of actors that ``actor`` descends from, itself first; records it for its children."""
    node = _descent.get()
    if node is None or node.actor is not actor:
        while node is not None and ended(node.actor):
            node = node.parent  # the line is kept as long as it matters, not as long as it was
        node = Descent(actor, node)
        _descent.set(node)
    return node


def descends(node: Descent | None, ancestor: Actor) -> bool:
    """Whether ``ancestor`` is on the line of ``node``."""
    while node is not None:
        if node.actor is ancestor:
            return True
        node = node.parent
    return False


def ended(actor: Actor) -> bool:
    """Whether ``actor`` can issue nothing more."""
    if isinstance(actor, threading.Thread):
        return not actor.is_alive()
    done = getattr(actor, "done", None)
    if done is not None:
        return bool(done())
    coroutine = getattr(actor, "coro", None)
    return coroutine is None or getattr(coroutine, "cr_frame", None) is None


def label(actor: Actor) -> str:
    """``task 'Task-3'`` or ``thread 'MainThread'``, for messages."""
    if isinstance(actor, threading.Thread):
        return f"thread {actor.name!r}"
    name = actor.get_name() if hasattr(actor, "get_name") else getattr(actor, "name", "?")
    return f"task {name!r}"

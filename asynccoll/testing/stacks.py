"""Stacks of simulated threads and of suspended coroutines."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asynccoll.host.call_site import is_ours, is_users
from asynccoll.host.frames import are_shown
from asynccoll.host.libraries import library_of
from asynccoll.host.standing import awaits
from asynccoll.testing.threads import SimulatedThread

__all__ = ["function_of", "suspended", "told"]

#: Files whose frames are left out.
_UNTOLD = ("/asynccoll/testing/", "/threading.py", "/asyncio/base_events.py")


def told(
    threads: Iterable[SimulatedThread],
    state_of: Callable[[SimulatedThread], str],
    more: Mapping[SimulatedThread, Callable[[], str]],
) -> str:
    """Return what each thread is doing, without our own frames.

    ``more`` describes what else some threads run; these (the ones that run event loops) come first. Threads
    that run nothing of the program are left out.
    """
    frames = sys._current_frames()
    parts = []
    for thread in sorted(threads, key=lambda thread: thread not in more):
        frame: Any = frames.get(thread.ident)
        if frame is not None:
            summaries = traceback.StackSummary.extract(traceback.walk_stack(frame))[::-1]
            users = any(is_users(one.filename) for one in summaries)
            shown = _telling(
                [(one.filename, traceback.StackSummary.from_list([one]).format()[0]) for one in summaries]
            )
            ours = [line for line in shown if not any(file in line for file in _UNTOLD)]
            rest = more[thread]() if thread in more else ""
            if users or rest:
                parts.append(f"{thread} ({state_of(thread)}):\n{''.join(ours[-8:])}{rest}")
    return "\n".join(parts)


def suspended(coroutine: Any) -> str:
    """Return the lines at which ``coroutine``, and what it awaits, are suspended."""
    lines = [
        (code.co_filename, f'    File "{code.co_filename}", line {line}, in {code.co_name}\n')
        for code, line in awaits(coroutine)
        if not (code.co_name == "__await__" and is_ours(code.co_filename))  # the line above shows the await
    ]
    return "".join(_telling(lines)[-8:])


def _telling(frames: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of a stack that are the program's, and the one of the function that it called last.

    ``frames`` has each line with its file. The frames that run a task, and those in which the last call
    waits, are the same in every program. All lines are returned if none is the program's, or if all frames
    are asked for.
    """
    users = [index for index, (file, _) in enumerate(frames) if is_users(file) and not library_of(file)]
    if not users or are_shown():
        return [line for _, line in frames]
    return [line for index, (_, line) in enumerate(frames) if index in users or index == users[-1] + 1]


def function_of(coroutine: Any) -> str:
    """Return the name of the coroutine's function, without the functions inside which it is defined."""
    name: str = getattr(coroutine, "__qualname__", type(coroutine).__qualname__)
    return name.rpartition("<locals>.")[2]

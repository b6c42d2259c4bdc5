"""Where threads stand, and coroutines that are not running."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asynccoll.host.call_site import is_users
from asynccoll.host.standing import awaits
from asynccoll.testing.threads import SimulatedThread

__all__ = ["function_of", "suspended", "told"]

#: Frames of these say nothing.
_UNTOLD = ("/asynccoll/testing/", "/threading.py", "/asyncio/base_events.py")


def told(
    threads: Iterable[SimulatedThread],
    state_of: Callable[[SimulatedThread], str],
    more: Mapping[SimulatedThread, Callable[[], str]],
) -> str:
    """What each of the program's is doing, frames of ours left out; of some there is ``more`` to tell.

    Those that run event loops come first; threads that run nothing of the program are left out.
    """
    frames = sys._current_frames()
    parts = []
    for thread in sorted(threads, key=lambda thread: thread not in more):
        frame: Any = frames.get(thread.ident)
        if frame is not None:
            summaries = traceback.StackSummary.extract(traceback.walk_stack(frame))[::-1]
            users = any(is_users(one.filename) for one in summaries)
            lines = traceback.StackSummary.from_list(summaries).format()
            ours = [line for line in lines if not any(file in line for file in _UNTOLD)]
            rest = more[thread]() if thread in more else ""
            if users or rest:
                parts.append(f"{thread} ({state_of(thread)}):\n{''.join(ours[-8:])}{rest}")
    return "\n".join(parts)


def suspended(coroutine: Any) -> str:
    """The lines at which it, and what it awaits, are suspended."""
    lines = [
        f'    File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in awaits(coroutine)
    ]
    return "".join(lines[-8:])


def function_of(coroutine: Any) -> str:
    """The function that it is a call of, by the name at the place where it is defined."""
    name: str = getattr(coroutine, "__qualname__", type(coroutine).__qualname__)
    return name.rpartition("<locals>.")[2]

"""Where threads stand, and coroutines that are not running."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asynccoll.host.standing import awaits
from asynccoll.testing.threads import SimulatedThread

__all__ = ["suspended", "told"]

#: Frames of these say nothing.
_UNTOLD = ("/asynccoll/testing/", "/threading.py", "/asyncio/base_events.py")


def told(
    threads: Iterable[SimulatedThread],
    state_of: Callable[[SimulatedThread], str],
    more: Mapping[SimulatedThread, Callable[[], str]],
) -> str:
    """What each is doing, frames of ours left out; of some there is ``more`` to tell."""
    frames = sys._current_frames()
    parts = []
    for thread in threads:
        frame: Any = frames.get(thread.ident)
        if frame is not None:
            lines = traceback.format_stack(frame)
            ours = [line for line in lines if not any(file in line for file in _UNTOLD)]
            rest = more[thread]() if thread in more else ""
            if ours or rest:
                parts.append(f"{thread} ({state_of(thread)}):\n{''.join(ours[-8:])}{rest}")
    return "\n".join(parts)


def suspended(coroutine: Any) -> str:
    """The lines at which it, and what it awaits, are suspended."""
    lines = [
        f'    File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in awaits(coroutine)
    ]
    return "".join(lines[-8:])

"""The line of the user's code that made a call: file and line, never a frame."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from types import CodeType
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: torch calls back into this package (autograd, hooks), so its frames are not the user's place either
_TORCH = os.path.join("site-packages", "torch") + os.sep
_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
#: These files run jobs and tasks for others: they are on the stack of every pool thread, but never the place
#: of a call.
_RUNNERS = tuple(
    os.path.join(*parts)
    for parts in (
        ("asyncio", "events.py"),
        ("asyncio", "tasks.py"),
        ("concurrent", "futures", "thread.py"),
        ("anyio", "_backends", "_asyncio.py"),
        ("trio", "_threads.py"),
        ("trio", "_core", "_thread_cache.py"),
    )
)

_OURS, _RUNNER, _USERS = 1, 2, 3
#: The kind of each file seen so far: a lookup is cheaper than comparing paths. ``contextlib`` enters and
#: leaves blocks on behalf of its callers, so it is not the place of a call either.
_kinds: dict[str, int] = {contextlib.__file__: _OURS, threading.__file__: _RUNNER}
#: There are at least these frames up to the user's: this one, site, Lane.issue, Call._begin, Call.begin.
_LEAST_DEPTH = 4


class Place(NamedTuple):
    """A line of the user's program. Shown as ``train.py:12``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Spot(NamedTuple):
    """A place as every call records it; the line number is computed only on demand."""

    code: CodeType | None
    instruction: int

    @property
    def file(self) -> str:
        """The source file."""
        return "" if self.code is None else self.code.co_filename

    @property
    def place(self) -> Place:
        """The line of the source."""
        return Place("", 0) if self.code is None else Place(self.file, _line(self.code, self.instruction))


@lru_cache(maxsize=1024)  # calls come from few lines, and to find one takes as long as the code is long
def _line(code: CodeType, instruction: int) -> int:
    found = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(found, None) or code.co_firstlineno


NOWHERE = Spot(None, 0)
#: The place of the public call that is being made, or that was deferred and is being made now.
called_at: ContextVar[Spot | None] = ContextVar("asynccoll_called_at", default=None)
#: The user's line that a hook runs for: backward may run in a thread without user code on its stack.
_on_behalf: ContextVar[Spot | None] = ContextVar("asynccoll_on_behalf", default=None)
_new_spot = partial(tuple.__new__, Spot)  # a named tuple's own __new__ is written in Python


@contextlib.contextmanager
def on_behalf_of(spot: Spot) -> Iterator[None]:
    """Attribute calls in the block to ``spot`` if the stack has no line of the user's."""
    before = _on_behalf.set(spot)
    try:
        yield
    finally:
        _on_behalf.reset(before)


def site() -> Spot:
    """Return the place of the user's call: as recorded when it was made (``called_at``), or by the stack."""
    return called_at.get() or caller()


def caller(least_depth: int = _LEAST_DEPTH) -> Spot:
    """Return the innermost place outside this package, at least ``least_depth`` frames above this one.

    Each frame that is passed costs about as much as a call.

    If all frames are in this package or torch, up to the runner of a pool or task if there is one, return the
    line that they run for (``on_behalf_of``), or else the outermost of those frames.
    """
    try:
        frame = sys._getframe(least_depth)
    except ValueError:  # called from the top of one of this library's threads
        frame = sys._getframe(1)
    inner = frame
    while (kind := _kinds.get(frame.f_code.co_filename) or _kind(frame.f_code.co_filename)) == _OURS:
        parent = frame.f_back
        if parent is None:
            break
        inner, frame = frame, parent
    if kind != _USERS:
        if (spot := _on_behalf.get()) is not None:
            return spot
        if kind == _RUNNER:
            frame = inner
    return _new_spot((frame.f_code, frame.f_lasti))


def is_ours(file: str) -> bool:
    """Whether ``file`` is part of this package."""
    return file.startswith(_PACKAGE)


def is_users(file: str) -> bool:
    """Whether ``file`` is part of the user's program or of a library that it uses."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and (_kinds.get(file) or _kind(file)) == _USERS


def _kind(file: str) -> int:
    if file.startswith(_PACKAGE) or _TORCH in file:
        kind = _OURS
    else:
        kind = _RUNNER if file.endswith(_RUNNERS) else _USERS
    return _kinds.setdefault(file, kind)

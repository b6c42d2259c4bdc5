"""Where in the user's code something was called: file and line, never a frame."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from types import CodeType
from typing import NamedTuple

__all__ = ["NOWHERE", "Place", "Spot", "called_at", "caller", "is_ours", "is_users", "on_behalf_of"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: torch calls back into this package (autograd, hooks); its frames are not the user's place either
_TORCH = os.path.join("site-packages", "torch") + os.sep
_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
#: These run jobs and tasks for others. Nobody calls from there, and a pool's threads are always in them.
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
#: What is known of files: looking up is cheaper than comparing. ``contextlib`` leaves blocks for others.
_kinds: dict[str, int] = {contextlib.__file__: _OURS, threading.__file__: _RUNNER}
#: Between here and the user are at least: this, Lane.issue, Call._begin, Call.begin, _start.
_LEAST_DEPTH = 4


class Place(NamedTuple):
    """A line of the user's program. Shown as ``train.py:12``."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Spot(NamedTuple):
    """A place as it is noted down in every call: which line it is, is found out when somebody asks."""

    code: CodeType | None
    instruction: int

    @property
    def file(self) -> str:
        """Of the source."""
        return "" if self.code is None else self.code.co_filename

    @property
    def place(self) -> Place:
        """The line."""
        if self.code is None:
            return Place("", 0)
        lines = self.code.co_lines()
        line = next((line for start, end, line in lines if start <= self.instruction < end), None)
        return Place(self.file, line or self.code.co_firstlineno)


NOWHERE = Spot(None, 0)
#: Where the user called what is issued now, if that is somewhere else (a call that was put off).
called_at: ContextVar[Spot | None] = ContextVar("asynccoll_called_at", default=None)
#: Which line of the user's a hook works for: backward may run in a thread where there is none on the stack.
_on_behalf: ContextVar[Spot | None] = ContextVar("asynccoll_on_behalf", default=None)
_new_spot = partial(tuple.__new__, Spot)  # a named tuple's own __new__ is Python


@contextlib.contextmanager
def on_behalf_of(spot: Spot) -> Iterator[None]:
    """What is called in the block, by none of the user's lines, is called for this one."""
    before = _on_behalf.set(spot)
    try:
        yield
    finally:
        _on_behalf.reset(before)


def caller(least_depth: int = _LEAST_DEPTH) -> Spot:
    """The innermost place outside this package (about 0.2 us: it is called for every operation).

    Of a job that is a function of this package, or of torch, it is the line that this works for
    (``on_behalf_of``), or else the function's.
    """
    try:
        frame = sys._getframe(least_depth)
    except ValueError:  # called from the top of a thread of our own
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
    """Whether ``file`` is of this package."""
    return file.startswith(_PACKAGE)


def is_users(file: str) -> bool:
    """Whether ``file`` is of the user's program, or of a library that it uses."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and (_kinds.get(file) or _kind(file)) == _USERS


def _kind(file: str) -> int:
    if file.startswith(_PACKAGE) or _TORCH in file:
        kind = _OURS
    else:
        kind = _RUNNER if file.endswith(_RUNNERS) else _USERS
    return _kinds.setdefault(file, kind)

"""Where in the user's code something was called: file and line, never a frame."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import CodeType
from typing import NamedTuple

__all__ = ["NOWHERE", "Place", "Spot", "caller"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: torch calls back into this package (autograd, hooks); its frames are not the user's place either
_TORCH = os.path.join("site-packages", "torch") + os.sep

#: Files known to be of the package or of torch: looking one up is cheaper than comparing it.
_ours: set[str] = set()
#: Between here and the user there are at least: this, Lane._record, Lane.issue, start_*, _start.
_LEAST_DEPTH = 5


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
_new_spot = partial(tuple.__new__, Spot)  # a named tuple's own __new__ is Python


def caller() -> Spot:
    """The innermost place outside this package (about 0.2 us: it is called for every operation)."""
    try:
        frame = sys._getframe(_LEAST_DEPTH)
    except ValueError:  # called from the top of a thread of our own
        frame = sys._getframe(1)
    while (code := frame.f_code).co_filename in _ours or _is_ours(code.co_filename):
        parent = frame.f_back
        if parent is None:
            break
        frame = parent
    return _new_spot((code, frame.f_lasti))


def _is_ours(file: str) -> bool:
    if file.startswith(_PACKAGE) or _TORCH in file:
        _ours.add(file)
        return True
    return False

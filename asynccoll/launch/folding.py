"""Shortens tracebacks for users: each run of frames of this library or of an event loop becomes one line.

Text in, text out. A traceback keeps what shows where it comes from: the frames of the program, and those that
raised, unless that is an error of ours, whose text says what to do, or a group, which shows what is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from asynccoll.host.call_site import Place, is_users
from asynccoll.host.frames import FULL_VARIABLE, are_shown
from asynccoll.host.libraries import library_of, line_for

__all__ = ["FULL_VARIABLE", "folded", "raised_at"]

_FRAME = re.compile(r'(?P<margin>[ |]*)  File "(?P<file>[^"]+)", line (?P<line>\d+)')
#: The frames that raised one of these say nothing more: an error of ours says what to do, and a group is
#: followed by the errors in it.
_SPEAKS_FOR_ITSELF = re.compile(r"[ |]*(asynccoll\.errors\.|(exceptiongroup\.)?(Base)?ExceptionGroup: )")


class _Frame(NamedTuple):
    """A frame's lines, and the library that it belongs to; "" for the program's."""

    lines: list[str]
    library: str
    margin: str


def folded(text: str) -> str:
    """Return ``text`` with its tracebacks folded, or all of it if ``FULL_VARIABLE`` asks for that."""
    if are_shown():
        return text
    return "\n".join(_folded_lines(text.split("\n")))


def raised_at(text: str) -> Place | None:
    """Return the last line of the program in a traceback: where it called what failed."""
    lines = [
        Place(found["file"], int(found["line"])) for found in map(_FRAME.match, text.split("\n")) if found
    ]
    return next((line for line in reversed(lines) if is_users(line.file)), None)


def _folded_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines; frames that follow each other are a stack."""
    stack: list[_Frame] = []
    for line in lines:
        found = _FRAME.match(line)
        if found is not None:
            stack.append(_Frame([line], library_of(found["file"]), found["margin"]))
        elif stack and line.startswith(f"{stack[-1].margin}  "):
            stack[-1].lines.append(line)
        else:
            yield from _shown(stack, line)
            stack = []
            yield line
    yield from _shown(stack, "")


def _shown(stack: Sequence[_Frame], error: str) -> Iterator[str]:
    """Yield the lines of a stack; ``error`` is the line below it."""
    whole = all(frame.library for frame in stack)  # no frame of the program: only these show the origin
    runs = [list(run) for _, run in groupby(stack, key=lambda frame: not frame.library)]
    for index, run in enumerate(runs):
        last = index == len(runs) - 1
        hidden = _SPEAKS_FOR_ITSELF.match(error) if last else len(run) > 1
        if whole or not hidden or not run[0].library:
            yield from (line for frame in run for line in frame.lines)
        elif len(run) > 1:  # a single frame is just left out
            yield f"{run[0].margin}  {line_for(frame.library for frame in run)}"

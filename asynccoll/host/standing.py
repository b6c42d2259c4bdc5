"""Where a program currently is: in its main thread, or, while that sleeps in an event loop, in its tasks.

The stack of a sleeping loop says nothing: what the program waits for is at the end of each task's chain of
awaits. Any thread may look, and no code of the program runs for it. This module must not know who looks, or
why.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from asynccoll.host.call_site import is_ours, is_users
from asynccoll.host.libraries import is_installed, library_of, with_library

_FRAMES = 30
_TASKS = 50
_TOLD = 3
_TRIO_RUN = "trio/_core/_run.py"
#: Event loops: their frames are neither the user's nor those of a library that does the user's work.
_LOOPS = ("asyncio", "anyio", "trio")

#: The files of a simulated host, whose frames are omitted: they represent the kernel.
_SIMULATED = f"{Path(__file__).parent.parent / 'testing'}/"

#: The files of the import system, whose frames are omitted: they say nothing about what is imported.
_IMPORTS = "<frozen importlib"

_Line = tuple[CodeType, int]


class Stack(NamedTuple):
    """Frames of a thread or a task, innermost first, as "function (file:line)"; ``at``: the user's innermost.

    ``who`` is "task 'name'", or "" for the main thread. ``in_call``: whether the thread or task waits in a
    call of this library, or for the tasks of a task group of this library.
    """

    who: str
    frames: tuple[str, ...]
    at: str
    in_call: bool


def stacks(thread: int) -> list[Stack]:
    """Return the stacks of ``thread``'s tasks if it sleeps in an event loop that has any; else its own."""
    frames = list(_frames(sys._current_frames().get(thread)))
    tasks = _tasks(frames) if _asleep(frames) else []
    return tasks or [_stack("", [(frame.f_code, frame.f_lineno) for frame in frames])]


def summary(found: Iterable[Stack]) -> str:
    """Say in a few words where the program is: "load (data.py:17)"; for several tasks, where each one is.

    "" if none of the stacks has code of the program.
    """
    users = [one for one in found if one.at]
    told = [one for one in users if not one.in_call] or users  # calls are known from the records
    if len(told) <= 1:
        return "".join(one.at for one in told)
    more = f", and {len(told) - _TOLD} more tasks" if len(told) > _TOLD else ""
    return ", ".join(f"{one.at} of {one.who}" for one in told[:_TOLD]) + more


def awaits(coroutine: Any) -> list[_Line]:
    """Return the lines at which a suspended coroutine and those that it awaits are, innermost last."""
    lines: list[_Line] = []
    while (frame := _of(coroutine, "cr_frame", "gi_frame", "ag_frame")) is not None and len(lines) < 1000:
        lines.append((frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno))
        coroutine = _of(coroutine, "cr_await", "gi_yieldfrom", "ag_await")
    return lines


def _of(one: object, *names: str) -> Any:
    return next((found for name in names if (found := getattr(one, name, None)) is not None), None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_SIMULATED, _IMPORTS)):
            yield frame
        frame = frame.f_back


def _is_loops(file: str) -> bool:
    return library_of(file) in _LOOPS


def _is_imported(line: _Line) -> bool:
    """Whether ``line`` is in an installed module, or one of Python's, that is being imported."""
    return line[0].co_name == "<module>" and is_installed(line[0].co_filename)


def _is_programs(file: str) -> bool:
    return is_users(file) and not _is_loops(file)


def _asleep(frames: list[FrameType]) -> bool:
    """Whether ``frames`` are those of an event loop that is running no code of the program right now."""
    for frame in frames:
        file = frame.f_code.co_filename
        if _is_programs(file) or is_ours(file):
            return False
        if _is_loops(file):
            return True
    return False


def _tasks(frames: Iterable[FrameType]) -> list[Stack]:
    """Return the stacks of the tasks of the loop in ``frames`` that run the program; those in calls last."""
    named = _asyncio_tasks(frames) or _trio_tasks(frames)
    found = [_stack(f"task {name!r}", awaits(coroutine)[::-1]) for name, coroutine in named[:_TASKS]]
    return sorted((one for one in found if one.at), key=lambda one: (one.in_call, len(one.who), one.who))


def _asyncio_tasks(frames: Iterable[FrameType]) -> list[tuple[str, Any]]:
    for frame in frames:
        if library_of(frame.f_code.co_filename) == "asyncio":
            owner = frame.f_locals.get("self")  # the loop, or the runner of a loop without frames (uvloop)
            loop = owner if isinstance(owner, asyncio.AbstractEventLoop) else getattr(owner, "_loop", None)
            if isinstance(loop, asyncio.AbstractEventLoop):
                return [(task.get_name(), task.get_coro()) for task in asyncio.all_tasks(loop)]
    return []


def _trio_tasks(frames: Iterable[FrameType]) -> list[tuple[str, Any]]:
    for frame in frames:
        if frame.f_code.co_filename.endswith(_TRIO_RUN):
            runner = frame.f_locals.get("runner")
            return [(task.name, task.coro) for task in list(getattr(runner, "tasks", ()))]
    return []


def _stack(who: str, lines: list[_Line]) -> Stack:
    """Build a stack of ``lines``, innermost first, without those inside this library or below the program."""
    programs = [line for line in lines if _is_programs(line[0].co_filename)]
    own = next((line for line in programs if not _is_imported(line)), programs[0] if programs else None)
    while own and not _is_programs(lines[-1][0].co_filename):  # in a launcher, a loop or a task group
        lines = lines[:-1]
    inner = next((file for line in lines if not _is_loops(file := line[0].co_filename)), "")
    return Stack(who, tuple(_frames_told(lines, own)), "" if own is None else _said(*own), is_ours(inner))


def _frames_told(lines: list[_Line], own: _Line | None) -> list[str]:
    """Return the frames as text, the most useful ones if there are many: the innermost, and ``own``.

    ``own`` is the program's innermost line. Of successive lines in this library, only the outermost is kept,
    which the program called; none is kept if the program awaits it, as the program's own line shows. Of
    installed modules that import each other, the first and the last are kept.
    """
    told = [
        line
        for line, outer in zip(lines, [*lines[1:], None], strict=False)
        if not (
            is_ours(line[0].co_filename)
            and outer is not None
            and (is_ours(outer[0].co_filename) or line[0].co_name == "__await__")
        )
    ]
    told = [
        line
        for inner, line, outer in zip([None, *told], told, [*told[1:], None], strict=False)
        if not all(one is not None and _is_imported(one) for one in (inner, line, outer))
    ]
    at = told.index(own) if own in told else 0
    if at < _FRAMES:
        return [_said(*line) for line in told[:_FRAMES]]
    left_out = at - _FRAMES + 2
    return [*(_said(*line) for line in told[: _FRAMES - 2]), f"[... {left_out} frames]", _said(*told[at])]


def _said(code: CodeType, line: int) -> str:
    return f"{getattr(code, 'co_qualname', code.co_name)} ({with_library(code.co_filename)}:{line})"

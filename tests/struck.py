"""Locks and blocks where Ctrl-C strikes, which comes between any two bytecodes: also as a lock is taken."""

from __future__ import annotations

import dis
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import asynccoll

__all__ = ["Strike", "Struck", "nth"]

_LIBRARY = str(Path(asynccoll.__file__).parent)
_SIMULATED = str(Path(_LIBRARY, "testing"))
#: The opcodes at whose end some version of Python handles signals.
_HANDLE_SIGNALS = frozenset(
    [
        "CALL",
        "CALL_FUNCTION",
        "CALL_FUNCTION_EX",
        "CALL_FUNCTION_KW",
        "CALL_KW",
        "CALL_METHOD",
        "JUMP_ABSOLUTE",
        "JUMP_BACKWARD",
    ]
)


def _is_ours(file: str) -> bool:
    """Whether it is a file of the library; a simulated lock takes the place of one that is not in Python."""
    return file.startswith(_LIBRARY) and not file.startswith(_SIMULATED)


class Struck:
    """A lock that raises KeyboardInterrupt when ``due`` says so: before it is taken, or after its release."""

    def __init__(self, due: Callable[[], bool], *, when: str = "released") -> None:
        self._lock = threading.Lock()
        self._due = due
        self._when = when

    def __enter__(self) -> None:
        if self._when == "taken" and self._due():
            raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._when == "released" and self._due():
            raise KeyboardInterrupt


def nth(use: int) -> Callable[[], bool]:
    """Return what is due once, when it is asked for the ``use``-th time."""
    left = use

    def due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    return due


class Strike:
    """A block in which Ctrl-C strikes once, in this thread: in the library, or in the function of ``code``.

    It strikes behind the ``left``-th call there, where Python handles signals (and where it jumps back), or
    ``at`` the ``left``-th "line" or "opcode".
    """

    def __init__(self, left: int, code: types.CodeType | None = None, *, at: str = "call") -> None:
        self._left = left
        self._code = code
        self._at = at
        self._latest: dict[types.FrameType, str] = {}  # the opcode that each frame has run last

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        # Python 3.12 traces opcodes only if a frame wanted them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)  # e.g. of `make coverage`, which would measure no later test
        self._latest.clear()

    def _trace(self, frame: types.FrameType, event: str, _: object) -> object:
        code = frame.f_code
        if code is not self._code if self._code else not _is_ours(code.co_filename):
            return None
        frame.f_trace_opcodes = self._at != "line"
        self._left -= self._counts(frame, event)
        if self._left == 0:
            self._left = -1
            raise KeyboardInterrupt
        return self._trace

    def _counts(self, frame: types.FrameType, event: str) -> bool:
        if event == "exception":
            # Behind a call that has raised, Python handles no signal before the handler has begun. An
            # exception there would be cleaned up as one of the handler, and what the call raised stay
            # ``sys.exc_info()``.
            self._latest[frame] = ""
        if self._at != "call" or event != "opcode":
            return event == self._at
        before, now = self._latest.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
        self._latest[frame] = now
        return before in _HANDLE_SIGNALS

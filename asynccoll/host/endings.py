"""How a process, or a program, ended, in words."""

from __future__ import annotations

import signal
import traceback

__all__ = ["in_a_line", "in_words", "is_failure", "is_new"]


def in_words(code: int) -> str:
    """``exit code 3``, ``killed by SIGKILL``: ``code`` as ``subprocess`` has it, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def is_failure(error: BaseException | None) -> bool:
    """Whether a program that ends with ``error`` has failed, as it has not with ``sys.exit(0)``."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def is_new(error: BaseException, known: set[object]) -> bool:
    """Whether ``known`` lacks this kind of error (its type, and the line that raised it), which it then has.

    For the log of a thread that goes on after errors, and may meet the same one again and again.
    """
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    kind = type(error), frame.f_code, line
    is_first = kind not in known
    known.add(kind)
    return is_first


def in_a_line(error: BaseException) -> str:
    """``ValueError: no such file``, as in the last line of a traceback; for a group, the errors in it."""
    inside = getattr(error, "exceptions", ())  # by its attribute: Python 3.10 has no such class
    if isinstance(inside, tuple) and inside and all(isinstance(one, BaseException) for one in inside):
        return f"{'; '.join(map(in_a_line, inside))} (in {type(error).__name__})"
    return traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0].rstrip(":")

"""How a process or a program ended, in words."""

from __future__ import annotations

import signal
import traceback


def in_words(code: int) -> str:
    """Describe an exit code: ``exit code 3``, ``killed by SIGKILL``. ``code`` is as in ``subprocess``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def is_failure(error: BaseException | None) -> bool:
    """Whether a program that ends with ``error`` has failed; ``sys.exit(0)`` is no failure."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def is_new(error: BaseException, known: set[object]) -> bool:
    """Whether ``known`` lacks this kind of error (its type and the line that raised it); add the kind to it.

    For the log of a thread that continues after errors and may get the same one again and again.
    """
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    kind = type(error), frame.f_code, line
    is_first = kind not in known
    known.add(kind)
    return is_first


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in an exception group, however nested, or ``error`` if it is none."""
    parts = getattr(error, "exceptions", None)  # by attribute: Python 3.10 has no ``ExceptionGroup``
    return [error] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def in_full(error: BaseException) -> str:
    """Return ``ValueError: no such file``, or ``KeyboardInterrupt`` for an error that says nothing more.

    Never raises, although the ``__str__`` of a user's error may: other ranks wait for what is said here.
    """
    try:
        said = str(error)
    except Exception as why:
        said = f"(its text raised {type(why).__name__})"
    return f"{type(error).__name__}: {said}".removesuffix(": ")


def in_a_line(error: BaseException) -> str:
    """Return ``ValueError: no such file``, as in the last line of a traceback; for a group, its errors."""
    inside = getattr(error, "exceptions", ())  # by attribute: Python 3.10 has no ``ExceptionGroup``
    if isinstance(inside, tuple) and inside and all(isinstance(one, BaseException) for one in inside):
        return f"{'; '.join(map(in_a_line, inside))} (in {type(error).__name__})"
    return traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0].rstrip(":")

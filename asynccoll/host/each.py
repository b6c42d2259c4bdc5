"""Call several functions, none of which may be skipped because another one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["call_each"]


def call_each(callbacks: Iterable[Callable[[], object]]) -> None:
    """Call all of ``callbacks``, even if some of them raise.

    Then the first error is raised; one that is not an ``Exception`` (Ctrl-C) takes precedence.
    """
    left = iter(callbacks)
    first: BaseException | None = None
    going = True
    while going:
        try:
            for callback in left:
                callback()
            going = False
        except BaseException as error:
            if first is None or (isinstance(first, Exception) and not isinstance(error, Exception)):
                first = error
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback refers to this frame: a reference cycle

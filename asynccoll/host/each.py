"""Several things of which none may be left out because another raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["call_each"]


def call_each(callbacks: Iterable[Callable[[], object]]) -> None:
    """Call ``callbacks``: where one raises, the others are called all the same.

    Then the first error is raised, or what is no ``Exception`` (Ctrl-C).
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
            del first  # whose traceback has this frame

"""Call several functions, none of which may be lost because another one raises, or because Ctrl-C strikes."""

from __future__ import annotations

from collections.abc import Callable, Iterable


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


def call_off(callbacks: list[Callable[[], object]]) -> None:
    """Take each of ``callbacks`` off the list and call it, once, even if another thread is doing the same.

    If one raises, those behind it stay on the list.
    """
    while callbacks:
        try:
            # Not by ``pop``: Ctrl-C may come as a call returns, and the callback would be lost.
            callback, callbacks[:1] = callbacks[0], ()
        except IndexError:  # another thread has taken the last one
            return
        callback()

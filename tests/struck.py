"""Locks at which Ctrl-C strikes, which comes between any two bytecodes: also where one is taken or left."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Struck", "nth"]


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

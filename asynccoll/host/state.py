"""What a process has once: its progress thread, the world it has joined, the memory that is being filled.

A module keeps no such state in a name of its own. It asks here for an object, of which only the attributes
change: so all of them can be found in one place, made anew in a forked child, and be another's for a while.
What is keyed by the thing that it is about (a model's lanes, a loop's turns) is no state of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asynccoll.host.forks import in_child

__all__ = ["kept", "per_process"]

T = TypeVar("T")

#: Everything that was asked for, in the order of asking, and how it is made.
kept: list[tuple[object, Callable[[], object]]] = []


def per_process(make: Callable[[], T], forked: Callable[[T], object] | None = None) -> T:
    """The one object that ``make`` gives; ``forked`` is called with it in a forked child."""
    one = make()
    kept.append((one, make))
    if forked is not None:
        in_child(after_in_child=lambda: forked(one))
    return one

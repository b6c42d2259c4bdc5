"""State that a process has once: its progress thread, the world it has joined, memory that is being filled.

A module does not assign such state to a global of its own. It gets an object from ``per_process``, and
changes only what is in that object: so all state is found in one place, can be made anew in a forked child,
and can be exchanged for a simulated rank's. State that is keyed by the object it is about (a model's lanes, a
loop's turns) is not state of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asynccoll.host.forks import in_child

__all__ = ["kept", "per_process"]

T = TypeVar("T")

#: All objects that were made, in that order, each with the function that made it.
kept: list[tuple[object, Callable[[], object]]] = []


def per_process(make: Callable[[], T], forked: Callable[[T], object] | None = None) -> T:
    """Make the process's one object by ``make`` and return it; ``forked`` gets it in a forked child."""
    one = make()
    kept.append((one, make))
    if forked is not None:
        in_child(after_in_child=lambda: forked(one))
    return one

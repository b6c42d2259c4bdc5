"""State that exists once per process: its progress thread, the world it has joined, memory being filled.

A module does not rebind a global of its own for such state. It gets an object from ``per_process`` and
changes only the contents of that object. So all state is registered in one place, can be recreated in a
forked child, and can be swapped for a simulated rank's. State that is keyed by the object it belongs to (a
model's lanes, a loop's turns) is not state of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asynccoll.host.forks import in_child

T = TypeVar("T")

#: All objects made so far, in order, each with the function that made it.
kept: list[tuple[object, Callable[[], object]]] = []


def per_process(make: Callable[[], T], forked: Callable[[T], object] | None = None) -> T:
    """Make the process's one object with ``make`` and return it; a forked child passes it to ``forked``."""
    one = make()
    kept.append((one, make))
    if forked is not None:
        in_child(after_in_child=lambda: forked(one))
    return one

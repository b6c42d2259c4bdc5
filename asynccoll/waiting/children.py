"""Which lanes of ended children are closed: the ``TaskGroup``'s rule, which is the same on every rank.

Ranks meet by a lane's name, and must close it as often, at the same place among its calls; but they may
start and end the children of different names in any order, and in several tasks at a time. So what is done
with a lane follows from what happened to its own name, and in the one task that leaves the groups:

- the first child of a name: its lane is closed when it ends, for it may well be the only one;
- from the second on it is kept: opening it anew at every step would cost milliseconds each time;
- when a task leaves a group, and those that it has left had many names together: then the lanes of all
  of these are closed, and the names count as new.

A group inside of another of the same task is left with that one, for the other's children may still run.
The lanes of a child's own children go with its lane.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from asynccoll import host
from asynccoll.host.actors import Actor

__all__ = ["Children"]

#: So many names a task's groups may have that keep the lanes of those that come again.
MANY_NAMES = 8


class Children:
    """The names of lanes of which a child has ended, in one rank's world."""

    def __init__(self, close: Callable[[str], object]) -> None:
        """``close`` closes the lanes of a name, in whichever groups of ranks they are open."""
        self._close = close
        self._ended: set[str] = set()
        self._below: dict[str, dict[str, None]] = {}  # by the parent's name
        self._left: weakref.WeakKeyDictionary[Actor, dict[str, None]] = weakref.WeakKeyDictionary()
        self._lock = host.Lock()

    def ended(self, name: str) -> None:
        """A child has ended whose lane is ``name``."""
        with self._lock:
            if name in self._ended:
                return
            closed = self._forget(name)
            self._ended.add(name)
            self._below.setdefault(_parent(name), {})[name] = None
        self._close_all(closed)

    def left(self, actor: Actor, names: Iterable[str]) -> None:
        """``actor`` is in no group of tasks any more; in the last, its children had these ``names``."""
        with self._lock:
            known = self._left.setdefault(actor, {})
            known |= dict.fromkeys(names)
            if len(known) <= MANY_NAMES:
                return
            closed = [each for name in known for each in self._forget(name)]
            known.clear()
        self._close_all(closed)

    def _forget(self, name: str) -> list[str]:
        """``name``, and those below it, count as new; they are returned. With the lock held."""
        self._ended.discard(name)
        self._below.get(_parent(name), {}).pop(name, None)
        below = self._below.pop(name, {})
        return [name, *(each for child in below for each in self._forget(child))]

    def _close_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._close(name)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]

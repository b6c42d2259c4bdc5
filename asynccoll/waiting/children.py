"""Which lanes of ended children are closed: the ``TaskGroup``'s rule, which is the same on every rank.

Ranks meet by a lane's name, and must close it as often, at the same place among its calls; but they may
start and end the children of different names in any order, and in several tasks at a time. So what is done
with a lane follows from what happened to its own name, and in the one task that leaves the groups:

- the first child of a name: its lane is closed when it ends, for it may well be the only one;
- from the second on it is kept: opening it anew at every step would cost milliseconds each time;
- when a task leaves a group, and those that it has left had many names together: then the lanes of all
  of these are closed, and the names count as new.

A group inside of another of the same task is left with that one, for the other's children may still run.
The lanes of a child's own children are closed when it ends: on another rank it may have ended before it had
any. So which of them ranks meet on (``times``) never depends on what a child has called, or whether it has.

Which child of its name makes a call is a part of what that call is, for on another rank the one before may
have made fewer calls, or more. One that fails or is cancelled makes no more calls: its lanes refuse
them, which ends them on the ranks whose child goes on, and the lane is in step again for the next one. What
it has not called on lanes that this rank has not opened is kept (``Unmade``): they refuse it when it opens
them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.errors import AbortedError
from asynccoll.host.actors import Actor
from asynccoll.host.call_number import CHILD
from asynccoll.host.endings import in_a_line

if TYPE_CHECKING:
    from asynccoll.order.lane import Lane

__all__ = ["Children", "Unmade"]

#: So many names a task's groups may have that keep the lanes of those that come again.
MANY_NAMES = 8


@dataclass(frozen=True, slots=True)
class Unmade:
    """Calls that children of one name have not made, on lanes that this rank has not opened."""

    first: int
    #: all children of that name have ended up to that one, the last of them with ``why``
    end: int
    why: str

    @property
    def place(self) -> int:
        """Of the first such call."""
        return self.first * CHILD + 1

    @property
    def until(self) -> int:
        """All are below that place."""
        return self.end * CHILD


class Children:
    """The names of lanes of which a child has ended, in one rank's world."""

    def __init__(
        self,
        lanes: Callable[[str], Iterable[Lane]],
        close: Callable[[str, str], object],
        note: Callable[[str, Unmade, Iterable[Lane]], object],
    ) -> None:
        """``lanes`` are those of a name, in whichever groups; ``close`` closes them, and is told why.

        ``note`` tells other ranks of calls that are not made, by the key that those lanes have in common:
        on lanes that are not among the given ones.
        """
        self._lanes = lanes
        self._close = close
        self._note = note
        self._unmade: dict[str, Unmade] = {}
        #: How many children of a name have ended, since it was new and in all, and how often its lanes were
        #: closed.
        self._ended: Counter[str] = Counter()
        self._in_all: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._below: dict[str, dict[str, None]] = {}  # by the parent's name
        self._left: weakref.WeakKeyDictionary[Actor, dict[str, None]] = weakref.WeakKeyDictionary()
        self._lock = host.Lock()

    def ended_on(self, name: str) -> int:
        """How many children have ended whose lane was ``name``, since it was new."""
        return self._ended[name]

    def unmade(self, name: str) -> Unmade | None:
        """What the children that have ended since it was new have not called, on a lane that is new here."""
        return self._unmade.get(name)

    def times(self, name: str) -> str:
        """What tells the lanes apart that a name has had, on ranks that have used them all or not."""
        numbers = [self._closed[name]]
        parent = name
        while parent := _parent(parent):
            numbers.append(self._in_all[parent])
        return f"c{'.'.join(map(str, numbers))}" if any(numbers) else ""

    def ended(self, name: str, error: BaseException | None = None) -> None:
        """A child has ended whose lane is ``name``; with ``error``, before it had made all of its calls."""
        why = _not_called(name, error)
        lanes = list(self._lanes(name))
        with self._lock:
            is_first = not self._ended[name]
            number, kin = self._ended[name], "~".join(filter(None, (name, self.times(name))))
            unmade = Unmade(number, number + 1, why) if why else None
            if unmade is not None and not is_first:
                before = self._unmade.get(name, unmade)
                unmade = self._unmade[name] = Unmade(before.first, number + 1, why)
            closed = [name] if is_first else []
            for below in [each for child in self._below.pop(name, {}) for each in self._forget(child)]:
                closed.append(below)
                del self._in_all[below], self._closed[below]
            self._closed[name] += is_first
            self._ended[name] += 1
            self._in_all[name] += 1
            self._below.setdefault(_parent(name), {})[name] = None
        for one in closed:
            self._close(one, why)
        for lane in () if is_first else lanes:
            lane.next_child(AbortedError(why) if why else None)
        if unmade is not None:
            self._note(kin, unmade, lanes)

    def left(self, actor: Actor, names: Iterable[str]) -> None:
        """``actor`` is in no group of tasks any more; in the last, its children had these ``names``."""
        with self._lock:
            known = self._left.setdefault(actor, {})
            known |= dict.fromkeys(names)
            if len(known) <= MANY_NAMES:
                return
            closed = [each for name in known for each in self._forget(name)]
            known.clear()
        for each in closed:
            self._close(each, "")

    def _forget(self, name: str) -> list[str]:
        """``name``, and those below it, count as new; they are returned, to be closed. With the lock held."""
        del self._ended[name]
        self._unmade.pop(name, None)
        self._closed[name] += 1
        self._below.get(_parent(name), {}).pop(name, None)
        below = self._below.pop(name, {})
        return [name, *(each for child in below for each in self._forget(child))]


def _not_called(name: str, error: BaseException | None) -> str:
    """Why the child makes no more calls on its lane, which others may wait for; "" if it has made all."""
    if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return ""  # or the program ends, which is heard of in any case
    ended = f"ended with {in_a_line(error)}" if isinstance(error, Exception) else "was cancelled"
    return f"its child task {name.rpartition('/')[2]!r} {ended} there"


def _parent(name: str) -> str:
    return name.rpartition("/")[0]

"""Which lanes of ended child tasks are closed: the ``TaskGroup``'s rule, which is the same on every rank.

A child task's lane is named after the child. Ranks match lanes by name, so all ranks must close a lane
equally often and at the same place among its calls. But they may start and end children of different names in
any order, and in several tasks at a time. So what happens to a lane depends only on the history of its own
name, and on the one task that leaves the groups:

- When the first child of a name ends, its lane is closed, since it may well be the only one of that name.
- From the second child on, the lane is kept: reopening it at every step would cost milliseconds each time.
  When so many children have ended that there are no numbers left for another one's places
  (``MOST_CHILDREN``), the lane is closed, and the name counts as new.
- When a task leaves a group, and the groups that it has left had many names in total, the lanes of all these
  names are closed, and the names count as new.

A group inside another group of the same task counts as left when the outer group is left, since the outer
group's children may still run. The lanes of a child's own children are closed when the child ends, since on
another rank it may have ended before it had any. So the key of a lane (``times``) never depends on which
calls a child has made, if any.

The child's number is part of each call's place, since on another rank the previous child may have made fewer
or more calls. A child that fails or is cancelled makes no more calls: its lanes refuse the remaining ones,
which ends those calls on ranks whose child continues. The lane is then in step again for the next child
(``order.cut``). Calls not made on lanes that this rank has not opened are recorded (``Unmade``): such a lane
refuses them when this rank opens it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asynccoll import host
from asynccoll.errors import AbortedError
from asynccoll.host.actors import Actor
from asynccoll.host.call_number import CHILD
from asynccoll.host.endings import in_a_line
from asynccoll.order.lane import Lane

#: Lanes of reused names are kept as long as the groups that a task has left have at most this many names.
MANY_NAMES = 8
#: A name counts as new after this many children: a place has 63 bits (``backends.memory.engine``).
MOST_CHILDREN = (1 << 62) // CHILD


@dataclass(frozen=True, slots=True)
class Unmade:
    """Calls that children of one name have not made, on lanes that this rank has not opened.

    They are the calls of children ``first`` to below ``end``; the last of these ended for the reason ``why``.
    """

    first: int
    end: int
    why: str

    @property
    def place(self) -> int:
        """The place of the first such call."""
        return self.first * CHILD + 1

    @property
    def until(self) -> int:
        """A place above all of these calls."""
        return self.end * CHILD


class Children:
    """How often children of each name have ended in one rank's world, and the effect on their lanes."""

    def __init__(
        self,
        lanes: Callable[[str], Iterable[Lane]],
        close: Callable[[str, str], object],
        note: Callable[[str, Unmade, Iterable[Lane]], object],
    ) -> None:
        """``lanes`` returns the lanes of a name in all groups; ``close`` closes those of a name for a reason.

        ``note`` tells other ranks about calls that are not made on lanes other than the given ones; its first
        argument is the key that the lanes of that name share.
        """
        self._lanes = lanes
        self._close = close
        self._note = note
        self._unmade: dict[str, Unmade] = {}
        #: by name: how many children have ended since the name counted as new, how many in total, and how
        #: often its lanes were closed
        self._ended: Counter[str] = Counter()
        self._in_all: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._below: dict[str, dict[str, None]] = {}  # the names of a child's own children, by its name
        self._left: weakref.WeakKeyDictionary[Actor, dict[str, None]] = weakref.WeakKeyDictionary()
        self._lock = host.Lock()

    def ended_on(self, name: str) -> int:
        """Return how many children named ``name`` have ended since the name counted as new."""
        return self._ended[name]

    def unmade(self, name: str) -> Unmade | None:
        """Return the calls that ended children of that name never made, on lanes this rank has not opened."""
        return self._unmade.get(name)

    def times(self, name: str) -> str:
        """Return the current suffix for the key of the name's lane; it changes each time the lane is closed.

        It is the same on all ranks, whether or not they have used all of the name's lanes. "" at first.
        """
        numbers = [self._closed[name]]
        parent = name
        while parent := _parent(parent):
            numbers.append(self._in_all[parent])
        return f"c{'.'.join(map(str, numbers))}" if any(numbers) else ""

    def ended(self, name: str, error: BaseException | None = None, cause: str = "") -> None:
        """Note that a child named ``name`` has ended; with ``error``, before it had made all of its calls.

        If that is a cancellation, ``cause`` is the error of another child, say, for which it was cancelled.
        Closes the lanes that must now be closed; lanes that stay open refuse the calls that were not made.
        """
        why = _not_called(name, error, cause)
        lanes = list(self._lanes(name))
        with self._lock:
            number, kin = self._ended[name], "~".join(filter(None, (name, self.times(name))))
            is_last = number + 1 == MOST_CHILDREN
            closes = is_last or not number
            unmade = Unmade(number, number + 1, why) if why else None
            if unmade is not None and number:
                before = self._unmade.get(name, unmade)
                unmade = self._unmade[name] = Unmade(before.first, number + 1, why)
            closed = [name] if closes else []
            for below in [each for child in self._below.pop(name, {}) for each in self._forget(child)]:
                closed.append(below)
                del self._in_all[below], self._closed[below]
            self._closed[name] += closes
            self._ended[name] += 1
            if is_last:
                del self._ended[name]
                self._unmade.pop(name, None)
            self._in_all[name] += 1
            self._below.setdefault(_parent(name), {})[name] = None
        for one in closed:
            self._close(one, why)
        for lane in () if closes else lanes:
            lane.next_child(AbortedError(why) if why else None)
        if unmade is not None:
            self._note(kin, unmade, lanes)

    def left(self, actor: Actor, names: Iterable[str]) -> None:
        """Note that ``actor`` has left its outermost task group, whose children had these ``names``.

        Closes the lanes of all names that its groups have had, if there are too many of them.
        """
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
        """Make ``name`` and the names below it count as new. Returns them: the caller closes their lanes.

        Called with ``_lock`` held.
        """
        del self._ended[name]
        self._unmade.pop(name, None)
        self._closed[name] += 1
        self._below.get(_parent(name), {}).pop(name, None)
        below = self._below.pop(name, {})
        return [name, *(each for child in below for each in self._forget(child))]


def _not_called(name: str, error: BaseException | None, cause: str) -> str:
    """Say why the child makes no more calls on its lane, for ranks that wait for them; "" if it has made all.

    Also "" if the program ends, which other ranks learn in any case.
    """
    if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return ""
    after = f" after {cause}" if cause else ""
    ended = f"ended with {in_a_line(error)}" if isinstance(error, Exception) else f"was cancelled{after}"
    return f"its child task {name.rpartition('/')[2]!r} {ended} there"


def _parent(name: str) -> str:
    return name.rpartition("/")[0]

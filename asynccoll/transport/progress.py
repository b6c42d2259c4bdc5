"""The one progress thread of a process: it sees to what nobody waits for.

It is for operations that can only be polled (mpi, horovod), and for those of several calls whose waiter,
who would make the next one, does not come (``stepping``).

An operation is *watched* from its issue on. The thread looks at it after a short grace, so that what
a waiter finishes in place costs no thread switch, and what nobody waits for yet goes on moving all the
same. It polls tightly for as long as the operation is expected to take, then backs off; what is in flight for
long (a peer is late, or will never come) is looked at now and then, so that it delays nothing else; with
nothing to watch it sleeps until something comes.

It must not know what it polls, nor who waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from asynccoll import host

__all__ = ["Pollable", "Progress", "progress"]

#: Looks without sleep at what is overdue, before naps begin.
YIELDS = 50
#: How long an operation is left to its waiter.
GRACE_SECONDS = 2e-4
SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3
#: Waiters that see to everything themselves are left alone for longer and longer, up to this: on busy
#: cores a look takes the GIL, and so some 100 us, from the thread that is inside the library.
LONGEST_CALM_SECONDS = 8e-3
#: With nothing to watch the thread first stays up for so long, so that a stream of operations need not
#: wake it for each.
LINGER_SECONDS = 50e-3
#: What is out for so long, and a hundred times as long as expected, is looked at only every so often: up to
#: a hundredth of its time may go by unnoticed, within bounds.
LONG_SECONDS = 0.5
SHORTEST_REST_SECONDS = 10e-3
LONGEST_REST_SECONDS = 100e-3


class Pollable(Protocol):
    """An operation that has to be asked whether it is over, from whatever thread."""

    @property
    def finished(self) -> bool:
        """Over, as far as is known, or taken from the thread by a waiter that sees to it."""
        ...

    @property
    def attended(self) -> bool:
        """Somebody waits for it in place and looks himself."""
        ...

    @property
    def urgent(self) -> bool:
        """The thread is to look at it without grace."""
        ...

    @property
    def lateness(self) -> float | None:
        """A look may be late by this part of the time since the operation is watched: so long are the naps.

        None: the thread is to be as early as it can, at the price of looking often.
        """
        ...

    def expected(self) -> float:
        """How many seconds it may well take from now: for so long, looking again at once is worth it."""
        ...

    def poll(self) -> bool:
        """Look; whether it is over. Its callbacks have been called then."""
        ...


class _Watched:
    """One operation as the thread sees it."""

    __slots__ = ("_long", "_rests", "_ripe", "_since", "item", "tight")

    def __init__(self, item: Pollable, now: float) -> None:
        self.item = item
        self._since = now
        self._ripe = now + GRACE_SECONDS
        expected = item.expected()
        #: until when to look again at once
        self.tight = now + expected
        self._long = now + max(LONG_SECONDS, 100 * expected)  # from then on it is out for long
        self._rests = -math.inf  # until when it is left alone

    def left(self, now: float) -> float:
        """Seconds for which it is left to its waiter, or alone."""
        if now < self._rests:
            return self._rests - now
        return 0.0 if self.item.urgent else self._ripe - now

    def late(self, now: float) -> float:
        """How late the next look may be."""
        part = self.item.lateness
        return 0.0 if part is None else max(SHORTEST_NAP_SECONDS, part * (now - self._since))

    def over(self, now: float) -> bool:
        item = self.item
        if item.attended or self.left(now) > 0:
            return item.finished
        if item.poll():
            return True
        if now >= self._long:
            rest = max(SHORTEST_REST_SECONDS, (now - self._since) / 100)
            self._rests = now + min(rest, LONGEST_REST_SECONDS)
        return False


class _Pace:
    """How soon the thread looks again, by what its last looks have found."""

    def __init__(self) -> None:
        self._looks = 0  # at what is overdue, since something happened
        self._calm = 0  # naps in a row after which there was nothing to do
        self._up_until = 0.0

    def moved(self, now: float) -> None:
        """An operation came or ended: where one ended, others may be close."""
        self._looks = 0
        self._up_until = now + LINGER_SECONDS

    def nap(self, watched: Sequence[_Watched], now: float) -> float:
        """Seconds until the next look: 0 to give way and look again, infinity to rest."""
        mine = [one for one in watched if not one.item.attended]
        due = [one for one in mine if one.left(now) <= 0]
        if due:
            self._calm = 0
            late = min(one.late(now) for one in due)
            if late > 0:
                return min(late, LONGEST_NAP_SECONDS)
            if any(now < one.tight for one in due):
                return 0.0
            self._looks += 1
            if self._looks <= YIELDS:
                return 0.0
            nap = SHORTEST_NAP_SECONDS * 2.0 ** min(self._looks - YIELDS, 6)
            longest = LONGEST_NAP_SECONDS
        elif watched or now < self._up_until:
            nap = LONGEST_NAP_SECONDS * 2.0 ** min(self._calm, 6)
            longest = LONGEST_CALM_SECONDS
            self._calm += 1
        else:
            return math.inf
        return min(nap, longest, *(one.left(now) for one in mine if one.left(now) > 0))


class Progress:
    """The thread, and what it watches. It starts with the first operation."""

    def __init__(self) -> None:
        self._new: deque[Pollable] = deque()
        self._alarm = host.Lock()  # released to wake the thread, taken to sleep
        self._alarm.acquire()
        self._starting = host.Lock()
        self._thread: host.Thread | None = None
        self._resting = True  # asleep until the alarm
        self._stopped = False

    def watch(self, item: Pollable) -> None:
        """Poll ``item`` until it is over; from now on if it is urgent, else after a while."""
        self._new.append(item)
        if self._resting:
            self.rouse()

    def rouse(self) -> None:
        """Look now: something has become urgent."""
        if self._thread is None:
            self._start()
        if self._alarm.locked():
            with contextlib.suppress(RuntimeError):  # another thread has rung meanwhile
                self._alarm.release()

    def here(self) -> bool:
        """Whether the caller is the thread."""
        thread = self._thread
        return thread is not None and thread.ident == host.get_ident()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopped:
                self._thread = host.Thread(target=self._run, name="asynccoll-progress", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, for good: the library it calls into is about to be finalized."""
        with self._starting:
            self._stopped = True
        thread = self._thread
        if thread is not None and thread is not host.current_thread():
            self.rouse()
            thread.join(1.0)

    def _run(self) -> None:
        watched: list[_Watched] = []
        pace = _Pace()
        self._resting = False
        while not self._stopped:
            now = host.monotonic()
            came = self._take(watched, now)
            before = len(watched)
            watched = [one for one in watched if not one.over(now)]
            if came or len(watched) < before:
                pace.moved(now)
            nap = pace.nap(watched, now)
            if nap == 0.0:
                host.give_way()
            elif nap < math.inf:
                self._alarm.acquire(timeout=nap)
            else:
                self._rest()

    def _take(self, watched: list[_Watched], now: float) -> bool:
        """Add those newly issued that are not over yet (most were finished by their waiter); if any came."""
        new = self._new
        came = bool(new)
        while new:
            item = new.popleft()
            if not item.finished:
                watched.append(_Watched(item, now))
        return came

    def _rest(self) -> None:
        """Sleep until something is watched."""
        self._resting = True
        # Said before this last look: a thread that appends after the look has read that we rest.
        if not self._new and not self._stopped:
            self._alarm.acquire()
        self._resting = False


#: In a forked child the same object, for others hold it; of the parent's threads and operations it has none.
progress: Progress = host.per_process(Progress, forked=Progress.__init__)
atexit.register(progress.stop)

"""The one progress thread of a process: it moves the operations that nobody waits for.

These are operations that can only be polled (mpi, horovod), and programs: operations of several native calls,
whose waiter would make the next call but has not begun to wait (``stepping``).

An operation is *watched* from its issue on. The thread first polls it after a short grace period: so an
operation that a waiter finishes in place costs no thread switch, and one that nobody waits for yet makes
progress all the same. The thread polls tightly for as long as the operation is expected to take, then backs
off. An operation in flight for long (a peer is late, or will never call) is polled now and then, so that it
delays no other. With nothing to watch the thread sleeps.

The module must not know what it polls, nor who waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from asynccoll import host
from asynccoll.host.endings import is_new
from asynccoll.host.helpers import start_once

__all__ = ["Pollable", "Progress", "progress"]

_log = logging.getLogger("asynccoll.work")

#: Polls of overdue operations without sleep, before naps begin.
YIELDS = 50
#: How long a new operation is left to its waiter.
GRACE_SECONDS = 2e-4
SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3
#: While waiters finish everything themselves, the thread naps for longer and longer, up to this: on busy
#: cores a poll takes the GIL, and so some 100 us, from the thread that is inside the library.
LONGEST_CALM_SECONDS = 8e-3
#: With nothing to watch the thread first stays awake for this long, so that a stream of operations need not
#: wake it for each.
LINGER_SECONDS = 50e-3
#: An operation in flight for this long, and for a hundred times as long as expected, is polled only after
#: rests of a hundredth of its time in flight, within the two bounds below.
LONG_SECONDS = 0.5
SHORTEST_REST_SECONDS = 10e-3
LONGEST_REST_SECONDS = 100e-3


class Pollable(Protocol):
    """An operation that must be polled to learn whether it is over, by any thread."""

    @property
    def finished(self) -> bool:
        """Whether the thread need not poll it any more: it is known to be over, or is driven otherwise."""
        ...

    @property
    def attended(self) -> bool:
        """Whether a waiter is polling it in place."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether the thread is to poll it without a grace period."""
        ...

    @property
    def lateness(self) -> float | None:
        """Naps between polls last this fraction of the time for which the operation has been watched.

        None: the thread is to notice the end as early as it can, at the price of polling often.
        """
        ...

    def expected(self) -> float:
        """The seconds from now for which polling again without a nap is worth it."""
        ...

    def poll(self) -> bool:
        """Poll it; returns whether it is over. If so, its callbacks have been called."""
        ...


class _Watched:
    """One operation as the thread sees it."""

    __slots__ = ("_long", "_rests", "_ripe", "_since", "item", "tight")

    def __init__(self, item: Pollable, now: float) -> None:
        self.item = item
        self._since = now
        self._ripe = now + GRACE_SECONDS
        expected = item.expected()
        #: until when to poll again without a nap
        self.tight = now + expected
        self._long = now + max(LONG_SECONDS, 100 * expected)  # from then on it is polled only after rests
        self._rests = -math.inf  # until when it is not polled

    def left(self, now: float) -> float:
        """Seconds until it is to be polled: the rest of its grace period, or of its rest."""
        if now < self._rests:
            return self._rests - now
        return 0.0 if self.item.urgent else self._ripe - now

    def late(self, now: float) -> float:
        """By how many seconds the next poll may be late."""
        part = self.item.lateness
        return 0.0 if part is None else max(SHORTEST_NAP_SECONDS, part * (now - self._since))

    def over(self, now: float) -> bool:
        """Poll the operation if it is time to; returns whether it is over."""
        item = self.item
        if item.attended or self.left(now) > 0:
            return item.finished
        if item.poll():
            return True
        if now >= self._long:
            self.rest(now, max(SHORTEST_REST_SECONDS, (now - self._since) / 100))
        return False

    def rest(self, now: float, seconds: float) -> None:
        """Do not poll it for so long."""
        self._rests = now + min(seconds, LONGEST_REST_SECONDS)


class _Pace:
    """How soon the thread polls again, judged by what its last polls have found."""

    def __init__(self) -> None:
        self._looks = 0  # rounds of polling with only overdue operations, since one was added or ended
        self._calm = 0  # naps in a row after which no operation was due to be polled
        self._up_until = 0.0

    def moved(self, now: float) -> None:
        """Note that an operation was added or ended: others may end soon."""
        self._looks = 0
        self._up_until = now + LINGER_SECONDS

    def nap(self, watched: Sequence[_Watched], now: float) -> float:
        """Seconds until the next round: 0 to poll again after giving way, infinity to rest until roused."""
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
    """The progress thread and its queue of new operations. The thread starts with the first of them."""

    def __init__(self) -> None:
        self._new: deque[Pollable] = deque()
        self._alarm = host.Lock()  # released to wake the thread, taken to sleep
        self._alarm.acquire()
        self._starting = host.Lock()
        self._thread: host.Thread | None = None
        self._resting = True  # asleep until the alarm
        self._stopped = False
        self._logged: set[object] = set()

    def watch(self, item: Pollable) -> None:
        """Poll ``item`` until it is over: from now on if it is urgent, else after its grace period."""
        self._new.append(item)
        if self._resting:
            self.rouse()

    def rouse(self) -> None:
        """Have the thread poll now, as something has become urgent; starts the thread if there is none."""
        if self._thread is None:
            self._start()
        if self._alarm.locked():
            with contextlib.suppress(RuntimeError):  # another thread has released it since
                self._alarm.release()

    def here(self) -> bool:
        """Whether the caller is the progress thread."""
        thread = self._thread
        return thread is not None and thread.ident == host.get_ident()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopped:
                thread = host.Thread(target=self._run, name="asynccoll-progress", daemon=True)
                start_once(thread, partial(setattr, self, "_thread"))

    def stop(self) -> None:
        """End the thread for good: the native library that it calls into is about to be finalized."""
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
            watched = [one for one in watched if not self._over(one, now)]
            if came or len(watched) < before:
                pace.moved(now)
            nap = pace.nap(watched, now)
            if nap == 0.0:
                host.give_way()
            elif nap < math.inf:
                self._alarm.acquire(timeout=nap)
            else:
                self._rest()

    def _over(self, one: _Watched, now: float) -> bool:
        """As ``one.over``; logs a new error in it, since other operations rely on this thread."""
        try:
            return one.over(now)
        except Exception as error:
            if is_new(error, self._logged):
                _log.exception("polling %r has failed", one.item)
            one.rest(now, LONGEST_REST_SECONDS)
            return one.item.finished

    def _take(self, watched: list[_Watched], now: float) -> bool:
        """Add the new operations that are not finished to ``watched`` (waiters have finished most).

        Returns whether any was issued.
        """
        new = self._new
        came = bool(new)
        while new:
            item = new.popleft()
            if not item.finished:
                watched.append(_Watched(item, now))
        return came

    def _rest(self) -> None:
        """Sleep until ``rouse`` is called."""
        self._resting = True
        # ``watch`` appends first and then reads _resting; here it is the other way round. So either the new
        # operation is seen here, or ``watch`` sees that the thread rests, and wakes it.
        if not self._new and not self._stopped:
            self._alarm.acquire()
        self._resting = False


#: In a forked child it is the same object, since others refer to it, but without the parent's thread and
#: operations.
progress: Progress = host.per_process(Progress, forked=Progress.__init__)
atexit.register(progress.stop)

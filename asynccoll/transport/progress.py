"""The one progress thread of a process: it advances operations that have no waiter yet.

These are operations that can only be polled (mpi, horovod), and programs: operations of several native calls,
whose waiter would make the next call but has not begun to wait (``stepping``).

An operation is *watched* from the moment it is issued. The thread first polls it after a short grace period:
an operation that a waiter finishes in place costs no thread switch, and one without a waiter still makes
progress. The thread polls tightly for as long as the operation is expected to take, then backs off. An
operation that has been in flight for long (a peer is late, or will never call) is polled only now and then,
so that it does not delay others. With nothing to watch the thread sleeps.

This module must not know what it polls or who waits for it.
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
from asynccoll.errors import CollectiveError
from asynccoll.host.endings import is_new
from asynccoll.host.helpers import start_once
from asynccoll.transport.completion import Callback, Completion

_log = logging.getLogger("asynccoll.work")

#: How many rounds poll overdue operations without sleeping before naps begin.
YIELDS = 50
#: How long a new operation is left to its waiter before the thread polls it.
GRACE_SECONDS = 2e-4
SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3
#: While waiters finish all operations themselves, naps grow up to this length. On busy cores a poll takes the
#: GIL away from the thread that is inside the native library, which costs that thread about 100 us.
LONGEST_CALM_SECONDS = 8e-3
#: With nothing to watch, the thread stays awake for this long before it sleeps, so that a stream of
#: operations need not wake it for each one.
LINGER_SECONDS = 50e-3
#: Once an operation has been in flight for this long and for a hundred times as long as expected, the thread
#: rests between polls of it: for a hundredth of its time in flight, within the two bounds below.
LONG_SECONDS = 0.5
SHORTEST_REST_SECONDS = 10e-3
LONGEST_REST_SECONDS = 100e-3


class Pollable(Protocol):
    """An operation that has to be polled to learn whether it is over; any thread may poll it."""

    @property
    def finished(self) -> bool:
        """Whether the thread can stop polling it: it is known to be over, or something else drives it."""

    @property
    def attended(self) -> bool:
        """Whether a waiter is polling it in place."""

    @property
    def urgent(self) -> bool:
        """Whether the thread should poll it without a grace period."""

    @property
    def lateness(self) -> float | None:
        """The length of naps between polls, as a fraction of how long the operation has been watched.

        None: the thread should notice the end as early as it can, at the price of polling often.
        """

    def expected(self) -> float:
        """Return for how many seconds from now polling without naps is worthwhile."""

    def poll(self) -> bool:
        """Poll the operation. Returns whether it is over; if so, its callbacks have been called."""


class _Watched:
    """One operation as the thread sees it."""

    __slots__ = ("_long", "_rests", "_ripe", "_since", "item", "tight")

    def __init__(self, item: Pollable, now: float) -> None:
        self.item = item
        self._since = now
        self._ripe = now + GRACE_SECONDS
        expected = item.expected()
        #: until when to poll without naps
        self.tight = now + expected
        self._long = now + max(LONG_SECONDS, 100 * expected)  # from then on, rest between polls of it
        self._rests = -math.inf  # until when not to poll it

    def left(self, now: float) -> float:
        """Return the seconds until it may be polled: what remains of its rest or of its grace period."""
        if now < self._rests:
            return self._rests - now
        return 0.0 if self.item.urgent else self._ripe - now

    def late(self, now: float) -> float:
        """Return by how many seconds the next poll may be late."""
        part = self.item.lateness
        return 0.0 if part is None else max(SHORTEST_NAP_SECONDS, part * (now - self._since))

    def over(self, now: float) -> bool:
        """Poll the operation if a poll is due. Returns whether the operation is over."""
        item = self.item
        if item.attended or self.left(now) > 0:
            return item.finished
        if item.poll():
            return True
        if now >= self._long:
            self.rest(now, max(SHORTEST_REST_SECONDS, (now - self._since) / 100))
        return False

    def rest(self, now: float, seconds: float) -> None:
        """Do not poll it for ``seconds``, or for the longest rest if that is shorter."""
        self._rests = now + min(seconds, LONGEST_REST_SECONDS)


class _Pace:
    """How soon the thread polls again, based on what its last polls found."""

    def __init__(self) -> None:
        self._looks = 0  # rounds that polled only overdue operations, since one was added or ended
        self._calm = 0  # consecutive naps after which no operation was due to be polled
        self._up_until = 0.0

    def moved(self, now: float) -> None:
        """Note that an operation was added or ended: others may end soon."""
        self._looks = 0
        self._up_until = now + LINGER_SECONDS

    def nap(self, watched: Sequence[_Watched], now: float) -> float:
        """Return the seconds until the next round: 0 to only yield the CPU, infinity to rest until roused."""
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
        self._alarm = host.Lock()  # the thread sleeps by acquiring it; releasing it wakes the thread
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
        """Make the thread poll now, because an operation became urgent; start the thread if there is none."""
        if self._thread is None:
            self._start()
        if self._alarm.locked():
            with contextlib.suppress(RuntimeError):  # another thread has released it in between
                self._alarm.release()

    def here(self) -> bool:
        """Whether the caller is the progress thread."""
        thread = self._thread
        return thread is not None and thread.ident == host.get_ident()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopped:
                start_once("asynccoll-progress", self._run, partial(setattr, self, "_thread"))

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
        """Call ``one.over``; log a new error rather than raise it: other operations need this thread."""
        try:
            return one.over(now)
        except Exception as error:
            if is_new(error, self._logged):
                _log.exception("polling %r has failed", one.item)
            one.rest(now, LONGEST_REST_SECONDS)
            return one.item.finished

    def _take(self, watched: list[_Watched], now: float) -> bool:
        """Add the new operations that are not finished to ``watched`` (waiters have finished most of them).

        Returns whether there were any new operations.
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
        # ``watch`` appends first and then reads _resting; here the order is reversed. So either this thread
        # sees the new operation, or ``watch`` sees that the thread is asleep and wakes it.
        if not self._new and not self._stopped:
            self._alarm.acquire()
        self._resting = False


#: A forked child keeps the same object, since others refer to it, but resets it: the parent's thread and
#: operations are gone.
progress: Progress = host.per_process(Progress, forked=Progress.__init__)
atexit.register(progress.stop)


class Polled(Completion):
    """An operation that is polled: the thread that finds it ``over`` calls its callbacks.

    One is created for every operation, so attributes that most never change are defaults of the class.
    """

    over: bool = False
    _callbacks: list[Callback] | None = None
    _error: CollectiveError | None = None

    @property
    def finished(self) -> bool:
        """Whether the progress thread has nothing left to do for it, callbacks included.

        A callback that was added while ``done`` found the end is left to that thread: the callback may take
        locks that the caller of ``done`` holds.
        """
        return self.over and not self._callbacks

    def error(self) -> CollectiveError | None:
        return self._error

    def _tell(self) -> None:
        """Call each callback once, even if another thread is doing the same."""
        host.call_off(self._callbacks or [])

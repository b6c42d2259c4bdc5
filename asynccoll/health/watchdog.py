"""The one thread per rank that checks on operations that have been waited for for more than a second.

Once a lane was lost with a rank, it immediately checks on operations that may wait for the same rank.

It sleeps while no operation is waited for. There are two exceptions. If a call may be over on one rank before
its peers have made theirs (``ends_alone``), the thread looks for refusals at intervals even if nothing waits
here for long, as those peers may wait. And unless warnings are off, it checks at intervals whether this rank
is a call apart from its neighbor. It never completes an operation; it finds out that one will never complete.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from asynccoll import host
from asynccoll.errors import PeerLostError
from asynccoll.host.endings import is_new
from asynccoll.host.helpers import start_once
from asynccoll.order.operation import Operation, Order
from asynccoll.transport.backend import Backend

_log = logging.getLogger("asynccoll.watch")

PATIENCE_SECONDS = 1.0
#: How often it looks for refusals while nothing waits for long, if it does so at all.
IDLE_SECONDS = 5.0
#: How often it checks whether ranks are a call apart; comparing 1,024 calls of each takes a millisecond.
SHIFT_SECONDS = 2.0
_STOP_SECONDS = 1.0


class Watched(Protocol):
    """What the watchdog needs of the world."""

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, and a store to learn of them."""

    backend: Backend
    stall_seconds: float  # the seconds of waiting after which to warn; 0.0 is never

    def tell_of_stall(self, operation: Any) -> None:
        """Warn that ``operation`` has been waited for that long."""

    def look_for_ends(self, parts: Sequence[Any]) -> None:
        """Refuse those ``parts`` that another rank's call does not have."""

    def loss(self, lane: Any) -> PeerLostError | None:
        """The error that names the lost ranks that ``lane`` waits for, or None if there are none."""

    def store_answers(self) -> bool:
        """Whether the rank that may serve the store answers."""

    def look_for_refusals(self) -> None:
        """Halt the lanes on which a peer has refused a call."""

    def look_for_shifts(self) -> None:
        """Warn of lanes on which this rank is a call apart from others."""


class Watch:
    """The operations that have waiters, and the thread that checks on the overdue ones."""

    def __init__(self, world: Watched) -> None:
        self._world = world
        # Taken by itself: Ctrl-C could leave a condition's lock locked, as it is entered in Python.
        self._lock = host.RLock()
        self._wake = host.Condition(self._lock)
        # Dicts, here and below, as the order of a set depends on addresses.
        self._watched: dict[Operation, int] = {}  # with the number of their waiters
        self._lately: dict[Operation, None] = {}  # waited for since the last look, but no longer
        self._told: dict[Operation, None] = {}  # those about which a warning was given
        self._looked: dict[Operation, int] = {}  # how often it was asked whether other ranks have such a part
        self._logged: set[object] = set()
        self._gone: set[int] = set()  # the ranks that some lane was lost with
        self._urgent: dict[Operation, None] = {}  # may wait for one of those ranks, and not asked about yet
        self._thread: host.Thread | None = None
        self._stopped = False
        self._asleep = False  # in ``_sleep``, to be woken; else the thread looks once a second by itself
        self._asked = self._compared = host.monotonic()  # when it last looked for refusals, for shifts

    def add(self, operation: Operation, waiters: int = 1) -> None:
        """Add ``waiters`` of ``operation``, none if it is only polled, and wake the thread."""
        if not self._world.has_peers:
            return
        with self._lock:
            self._watched[operation] = self._watched.get(operation, 0) + waiters
            self._hurry([operation])
            if self._asleep:
                self._wake.notify()

    def lost(self, ranks: Iterable[int]) -> None:
        """Note that a lane was lost with ``ranks``: other waits for them need not become overdue first."""
        with self._lock:
            self._gone.update(ranks)
            self._hurry(self._watched)

    def _hurry(self, operations: Iterable[Operation]) -> None:
        """Ask at once about those of ``operations`` that may wait for a lost rank. With the lock held."""
        for operation in operations:
            if self._gone and not self._gone.isdisjoint(operation.lane.group.ranks):
                self._urgent[operation] = None
                self._wake.notify()

    def begin(self) -> None:
        """Start the thread, now that the world has formed: at the end of the program none may start."""
        if self._world.has_peers:
            start_once("asynccoll-watch", self._run, partial(setattr, self, "_thread"))

    def discard(self, operation: Operation) -> bool:
        """Remove a waiter of ``operation``; return whether it has others."""
        with self._lock:
            others = self._watched.pop(operation, 1) - 1
            if others:
                self._watched[operation] = others
            else:
                self._urgent.pop(operation, None)
                if not operation.done():
                    self._lately[operation] = None
            return others > 0

    def stop(self) -> None:
        """End the thread, and wait for that, lest it is in a native call when the interpreter ends."""
        with self._lock:
            self._stopped = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not host.current_thread():
            thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while True:
            with self._lock:
                woken = self._sleep()
                if woken:
                    self._wake.wait_for(lambda: self._stopped or self._urgent, PATIENCE_SECONDS)
                if self._stopped:
                    return
                late = host.monotonic() - PATIENCE_SECONDS
                self._watched = {op: many for op, many in self._watched.items() if not op.done()}
                asked_for, self._lately = dict.fromkeys(self._watched) | self._lately, {}
                stalled = self._stalled(asked_for)
                urgent, self._urgent = self._urgent, {}
                due = (op for op in asked_for if op.started <= late or op in urgent)
                overdue = [op for op in due if not op.done()]
                lanes, parts = dict.fromkeys(op.lane for op in overdue), self._due(overdue)
            if lanes or self._is_due():
                self._asked = host.monotonic()
                self._ask_after(lanes)
                with self._going_on():
                    if parts:
                        self._world.look_for_ends(parts)
            for operation in stalled:
                with self._going_on():
                    if not operation.done():
                        self._world.tell_of_stall(operation)
            with self._going_on():
                self._look_for_shifts()

    def _is_due(self) -> bool:
        """Whether it is time to look for refusals although nothing waits here, or only for moments."""
        return self._world.backend.ends_alone and self._asked + IDLE_SECONDS <= host.monotonic()

    def _look_for_shifts(self) -> None:
        now = host.monotonic()
        if self._world.stall_seconds and self._compared + SHIFT_SECONDS <= now:
            self._compared = now
            self._world.look_for_shifts()

    def _stalled(self, waited_for: Iterable[Operation]) -> list[Operation]:
        """Return the operations to warn about as stuck, each of them once. Called with the lock held."""
        limit = self._world.stall_seconds
        late = host.monotonic() - limit
        stalled = [one for one in waited_for if limit and one.started <= late and one not in self._told]
        self._told = dict.fromkeys(one for one in (*self._told, *stalled) if not one.done())
        return stalled

    def _due(self, overdue: Iterable[Operation]) -> list[Operation]:
        """Return the parts of calls to ask about, as peers may have fewer: each when its age has doubled."""
        now = host.monotonic()
        ages = {one: int(now - one.started).bit_length() for one in overdue if one.part > 1}
        before, self._looked = self._looked, ages
        return [one for one, age in ages.items() if age > before.get(one, 0)]

    def _sleep(self) -> bool:
        """Sleep until something waits here, or until the next look; return whether something waits."""
        self._asleep = True
        alone = IDLE_SECONDS if self._world.backend.ends_alone else None
        seconds = SHIFT_SECONDS if self._world.stall_seconds else alone
        woken = self._wake.wait_for(lambda: self._watched or self._lately or self._stopped, seconds)
        self._asleep = False
        return bool(woken)

    def _ask_after(self, lanes: Iterable[Order]) -> None:
        """Find out whether ``lanes`` wait for a lost rank, or a peer has refused a call on any lane."""
        for lane in lanes:
            with self._going_on():
                lost = self._world.loss(lane)
                if lost is not None:
                    lane.lose(lost)
        with self._going_on():
            if self._world.store_answers():
                with contextlib.suppress(RuntimeError):  # the store may go with rank 0 between two questions
                    self._world.look_for_refusals()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Log a new error in the block: the thread continues, since waiters rely on its other checks."""
        try:
            yield
        except OSError:  # the process may be out of descriptors: it is asked again in a second
            _log.debug("a rank could not be queried", exc_info=True)
        except Exception as error:
            if is_new(error, self._logged):
                _log.exception("a check for stalled operations failed; the next one runs as usual")

"""The one thread that looks after operations which are in flight for longer than they should be.

It sleeps whenever nothing waits for a second; but where a call may be over on one rank before its peers have
made theirs, it looks for refusals now and then also while nothing waits here: those peers may. And now and
then it looks whether this rank is a call apart from the next one, unless nobody wants to be warned: then it
exists only once something has waited. It never completes an operation; it finds out that one never will.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asynccoll import host

if TYPE_CHECKING:
    from asynccoll.errors import PeerLostError
    from asynccoll.order.operation import Operation, Order

__all__ = ["Watch"]

_log = logging.getLogger("asynccoll.watch")

PATIENCE_SECONDS = 1.0
#: How often it looks while nothing waits, where it does.
IDLE_SECONDS = 5.0
#: How often it looks whether ranks are a call apart: of 1,024 calls of each that takes a millisecond.
SHIFT_SECONDS = 2.0
_STOP_SECONDS = 1.0


class Watched(Protocol):
    """The world whose operations they are."""

    @property
    def has_peers(self) -> bool:
        """Whether there is anybody, and a store to hear of them."""

    stall_seconds: float  # after which somebody is to be told; 0.0 is never

    def tell_of_stall(self, operation: Any) -> None:
        """It has been waited for that long."""

    @property
    def ends_alone(self) -> bool:
        """Whether a call may be over on one rank before its peers have made theirs."""

    def look_for_ends(self, parts: Sequence[Any]) -> None:
        """Refuse those parts of calls that were over before on another rank."""

    def loss(self, lane: Any) -> PeerLostError | None:
        """The error that names the ranks that are gone and that ``lane`` waits for, if any is."""

    def store_answers(self) -> bool:
        """Whether the rank that may serve the store is there."""

    def look_for_refusals(self) -> None:
        """Halt the lanes on which a peer has refused a call."""

    def look_for_shifts(self) -> None:
        """Warn of lanes on which this rank is a call apart from others."""


class Watch:
    """Operations that somebody is waiting for, and a thread that asks after the overdue ones."""

    def __init__(self, world: Watched) -> None:
        self._world = world
        self._wake = host.Condition()
        # As keys, here and below: a set has its order from addresses.
        self._watched: dict[Operation, int] = {}  # and by how many
        self._lately: dict[Operation, None] = {}  # waited for since the last look, for however short a time
        self._told: dict[Operation, None] = {}  # of which somebody was told that they are stuck
        self._looked: dict[Operation, int] = {}  # so often it was asked whether others have such a part
        self._thread: host.Thread | None = None
        self._stopped = False
        self._asleep = False  # with nothing to look after; else it looks once a second by itself
        self._asked = self._compared = host.monotonic()  # when it looked last for refusals, for shifts

    def add(self, operation: Operation) -> None:
        """Somebody waits for ``operation``."""
        if not self._world.has_peers:
            return
        with self._wake:
            self._watched[operation] = self._watched.get(operation, 0) + 1
            self._start()

    def begin(self) -> None:
        """The world has come together."""
        if (self._world.ends_alone or self._world.stall_seconds) and self._world.has_peers:
            with self._wake:
                self._start()

    def _start(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = host.Thread(target=self._run, name="asynccoll-watch", daemon=True)
            self._thread.start()
        elif self._asleep:
            self._wake.notify()

    def discard(self, operation: Operation) -> bool:
        """One does not any more, or not just now; whether another one does."""
        with self._wake:
            others = self._watched.pop(operation, 1) - 1
            if others:
                self._watched[operation] = others
            elif not operation.done():
                self._lately[operation] = None
            return others > 0

    def stop(self) -> None:
        """End the thread; when this returns it is in no native call that the interpreter could end under."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not host.current_thread():
            thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while True:
            with self._wake:
                woken = self._sleep()
                if woken:
                    self._wake.wait_for(lambda: self._stopped, PATIENCE_SECONDS)
                if self._stopped:
                    return
                late = host.monotonic() - PATIENCE_SECONDS
                self._watched = {op: many for op, many in self._watched.items() if not op.done()}
                asked_for, self._lately = dict.fromkeys(self._watched) | self._lately, {}
                stalled = self._stalled(asked_for)
                overdue = [op for op in asked_for if op.started <= late and not op.done()]
                lanes, parts = dict.fromkeys(op.lane for op in overdue), self._due(overdue)
            if lanes or self._is_due(idle=not woken):
                self._asked = host.monotonic()
                try:
                    self._ask_after(lanes)
                    if parts:
                        self._world.look_for_ends(parts)
                except OSError:  # of descriptors there may be none just now: it is asked again in a second
                    _log.debug("asking after %s failed", lanes, exc_info=True)
            for operation in stalled:
                if not operation.done():
                    self._world.tell_of_stall(operation)
            self._look_for_shifts()

    def _is_due(self, *, idle: bool) -> bool:
        """Whether it is time to look for refusals although nothing waits here."""
        return idle and self._world.ends_alone and self._asked + IDLE_SECONDS <= host.monotonic()

    def _look_for_shifts(self) -> None:
        now = host.monotonic()
        if self._world.stall_seconds and self._compared + SHIFT_SECONDS <= now:
            self._compared = now
            self._world.look_for_shifts()

    def _stalled(self, waited_for: Iterable[Operation]) -> list[Operation]:
        """Those that have become overdue; each is told of once. With the lock held."""
        limit = self._world.stall_seconds
        late = host.monotonic() - limit
        stalled = [one for one in waited_for if limit and one.started <= late and one not in self._told]
        self._told = dict.fromkeys(one for one in (*self._told, *stalled) if not one.done())
        return stalled

    def _due(self, overdue: Iterable[Operation]) -> list[Operation]:
        """Parts of calls, of which other ranks may have fewer: asked after whenever their age has doubled."""
        now = host.monotonic()
        ages = {one: int(now - one.started).bit_length() for one in overdue if one.part > 1}
        before, self._looked = self._looked, ages
        return [one for one, age in ages.items() if age > before.get(one, 0)]

    def _sleep(self) -> bool:
        """Until something waits here: whether it does, or it is time to look although nothing does."""
        self._asleep = True
        alone = IDLE_SECONDS if self._world.ends_alone else None
        seconds = SHIFT_SECONDS if self._world.stall_seconds else alone
        woken = self._wake.wait_for(lambda: self._watched or self._lately or self._stopped, seconds)
        self._asleep = False
        return bool(woken)

    def _ask_after(self, lanes: Iterable[Order]) -> None:
        """Find out whether a rank is gone that ``lanes`` wait for, or one has refused a call on any lane."""
        for lane in lanes:
            lost = self._world.loss(lane)
            if lost is not None:
                lane.lose(lost)
        if self._world.store_answers():
            with contextlib.suppress(RuntimeError):  # the store may go with rank 0 between two questions
                self._world.look_for_refusals()

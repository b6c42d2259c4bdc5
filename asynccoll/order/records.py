"""What a lane writes to its rank's flight recorder: each call, the end of a call in parts, each refused call.

It must not know when calls are made, nor what becomes of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.flight import END
from asynccoll.host.call_site import Spot, called_at, caller
from asynccoll.order.operation import Estimate

if TYPE_CHECKING:
    from asynccoll.flight import Recorder
    from asynccoll.order.needs import Subject
    from asynccoll.order.operation import Operation

__all__ = ["Records"]


class Records:
    """The records of one lane, which its ranks open under ``key``. The lane's lock need not be held."""

    __slots__ = ("_names", "_recorder", "number")

    def __init__(self, recorder: Recorder, group: str, key: str, name: str) -> None:
        self._recorder = recorder
        self._names = (group, key, name)
        self.number: int = recorder.lane(group, key)

    def note(
        self, operation: Operation, spot: Spot, size_bytes: int, of: Subject | None, *, queued: bool
    ) -> None:
        """Record that ``operation``, called at ``spot``, was accepted; sets its ``ticket``."""
        recorder, estimate, called = self._recorder, operation.estimate, operation.started
        # Ids stand for objects that take longer to compare; ``learn`` keeps these alive as long as the key.
        key = (
            (estimate, id(spot[0]), spot[1])
            if of is None
            else (estimate, id(of.plan), of.shape, id(spot[0]), spot[1])
        )
        operation.ticket = recorder.note(
            recorder.texts.get(key) or self._describe(key, estimate, spot, of),
            self.number,
            operation.sequence,
            operation.part if operation.peer < 0 else operation.tag,
            operation.peer,
            size_bytes,
            called,
            0.0 if queued else called,
        )

    def _describe(self, key: Hashable, estimate: Estimate, spot: Spot, of: Subject | None) -> int:
        """Record the text for operations of this kind; returns its number."""
        said = "" if of is None else of.described()
        parts = (*self._names, estimate.name, said, str(spot.place))
        return self._recorder.learn(key, parts, (estimate, spot, of and of.plan))

    def begun(self, ticket: int) -> None:
        """Record that a queued operation is being issued."""
        self._recorder.begun(ticket, host.monotonic())

    def ended(self, place: int, part: int) -> None:
        """Record that the call in parts at ``place`` has no ``part``, for peers that wait for that part."""
        spot, now = called_at.get() or caller(), host.monotonic()
        key = (END, self, id(spot[0]), spot[1])  # not the row's number: a closed lane may have had that
        text = self._recorder.texts.get(key) or self._describe(key, Estimate(END), spot, None)
        self._recorder.ended(self._recorder.note(text, self.number, place, part, -1, 0, now, now), now)

    def refused(self, name: str, place: int, part: int, peer: int, why: str) -> None:
        """Record that the caller's call is refused and not made, for peers that wait for it and for tools."""
        recorder, now = self._recorder, host.monotonic()
        text = self._describe(("refused", name), Estimate(name), called_at.get() or caller(), None)
        recorder.refused(recorder.note(text, self.number, place, part, peer, 0, now, now), why, now)

    def forget(self) -> None:
        """Forget the lane, which is closed."""
        number, self.number = self.number, -1  # another lane may soon have that row
        self._recorder.forget_lane(number)

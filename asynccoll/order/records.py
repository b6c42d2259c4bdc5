"""What a lane writes to its rank's flight recorder: each call, the end of a call in parts, each refused call.

This module must not know when calls are made or how they end.
"""

from __future__ import annotations

from collections.abc import Hashable

from asynccoll import host
from asynccoll.flight import END, Recorder
from asynccoll.host.call_site import Spot, site
from asynccoll.order.needs import Subject
from asynccoll.order.operation import Estimate
from asynccoll.order.ownership import Stream


class Records:
    """The records of one lane, which its ranks opened under ``key``. The lane's lock need not be held."""

    __slots__ = ("_names", "_recorder", "number")

    def __init__(self, recorder: Recorder, group: str, key: str, name: str) -> None:
        self._recorder = recorder
        self._names = (group, key, name)
        self.number: int = recorder.lane(group, key)

    def note(
        self,
        estimate: Estimate,
        spot: Spot,
        size_bytes: int,
        of: Subject | None,
        place: int,
        part: int,
        stream: Stream | None,
        called: float,
        *,
        begun: bool,
    ) -> int:
        """Record an operation called at ``spot``, which is being issued, or queued if not ``begun``.

        A message has no ``place`` and ``part``, but the ``stream`` that it belongs to. Returns the ticket of
        the record.
        """
        recorder, peer = self._recorder, -1
        if stream is not None:
            place, (_, peer, part) = 0, stream
        # Ids replace objects that take longer to compare; ``learn`` keeps those alive for as long as the key.
        key = (
            (estimate, id(spot[0]), spot[1])
            if of is None
            else (estimate, id(of.plan), of.shape, of.detail, id(spot[0]), spot[1])
        )
        text = recorder.texts.get(key) or self._describe(key, estimate, spot, of)
        begins = called if begun else 0.0
        return recorder.note(text, self.number, place, part, peer, size_bytes, called, begins)

    def _describe(self, key: Hashable, estimate: Estimate, spot: Spot, of: Subject | None) -> int:
        """Record the text for operations of this kind. Returns the number of the text."""
        said = "" if of is None else of.described()
        parts = (*self._names, estimate.name, said, str(spot.place))
        return self._recorder.learn(key, parts, (estimate, spot, of and of.plan))

    def withdraw(self, ticket: int, latest: int, *, message: bool) -> None:
        """Delete the record of an operation that was not accepted; ``latest`` is the lane's latest place."""
        self._recorder.withdraw(ticket, -1 if message else self.number, latest)

    def held(self, ticket: int) -> None:
        """Record that an operation is queued, even if it was recorded as begun."""
        self._recorder.begun(ticket, 0.0)

    def begun(self, ticket: int) -> None:
        """Record that a queued operation is being issued."""
        self._recorder.begun(ticket, host.monotonic())

    def ended(self, place: int, part: int) -> None:
        """Record that the call in parts at ``place`` has no ``part``, for peers that wait for that part."""
        spot, now = site(), host.monotonic()
        key = (END, self, id(spot[0]), spot[1])  # not the row number: a closed lane may have used that
        text = self._recorder.texts.get(key) or self._describe(key, Estimate(END), spot, None)
        self._recorder.ended(self._recorder.note(text, self.number, place, part, -1, 0, now, now), now)

    def refused(self, name: str, place: int, part: int, peer: int, why: str) -> None:
        """Record that this rank refuses a call and never makes it, for tools and for peers that wait."""
        recorder, now = self._recorder, host.monotonic()
        text = self._describe(("refused", name), Estimate(name), site(), None)
        recorder.refused(recorder.note(text, self.number, place, part, peer, 0, now, now), why, now)

    def forget(self) -> None:
        """Forget the lane, which is closed."""
        number, self.number = self.number, -1  # another lane may soon reuse that row
        self._recorder.forget_lane(number)

"""The default comparison of calls, as they are made: with ranks on this node, and with other nodes.

If a backend connects the ranks of a node by sockets, each rank writes a header of its call
(``flight.headers``), which the others read before they make theirs. If ranks send through shared memory, the
engine that moves the data compares the calls itself. Ranks on other nodes are notified of calls that they
cannot expect (``confirming``). With ``check="full"`` all calls are compared beforehand instead (``checks``).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping

from asynccoll.errors import CollectiveMismatchError
from asynccoll.flight import Headers, Recorder
from asynccoll.flight.layout import TEXT_BYTES
from asynccoll.health.checks import mismatch
from asynccoll.health.confirming import Announced, Confirming
from asynccoll.host.call_site import Spot
from asynccoll.host.words import encoded
from asynccoll.order.lane import Lane
from asynccoll.plan.texts import at_line, shown
from asynccoll.transport.completion import Promise


class Compared:
    """Compares one lane's calls.

    ``call`` is used with the lane's lock held, or by the thread that drives the lane's queue.
    """

    def __init__(
        self,
        lane: Lane,
        rank: int,
        recorder: Recorder,
        near: Mapping[int, memoryview],
        far: Confirming | None = None,
    ) -> None:
        """``near``: the flight recorders' memory of the other ranks on this node, by rank."""
        self._far = far
        self._lane = lane
        self._rank = rank
        self._recorder = recorder
        self._headers = Headers(recorder, lane.records.number, lane.group.key, lane.key, near)

    def restart(self, epoch: int) -> None:
        """Start the comparison over: all ranks are in step again, whatever they called before."""
        self._headers.restart(epoch)
        if self._far is not None:
            self._far.restart(epoch)

    def call(
        self, what: Hashable, spot: Spot, place: int, part: int
    ) -> CollectiveMismatchError | Promise | None:
        """Compare the call that is about to be made.

        Returns the error to raise instead, or a promise to wait for first, which completes with that error or
        without one, or None to make the call. Also None if the same call was compared before.
        """
        key = (what, id(spot.code), spot.instruction)
        known = self._recorder.texts.get(key) or self._learn(key, what, spot)
        checksum = known & 0xFFFFFFFF
        differ = self._headers.write(checksum, known >> 32, place, part)
        if differ is None:
            return None
        if differ:
            texts = {rank: self._headers.text(rank) for rank in differ}
            texts[self._rank] = _said(what, spot).decode(errors="replace")
            ranks = sorted(texts)
            begins = min((place, part), *differ.values())
            return mismatch(self._lane, ranks, [texts[rank] for rank in ranks], begins)
        if self._far is None:
            return None
        text = lambda: _said(what, spot).decode(errors="replace")  # noqa: E731  # the call in words
        said = Announced(self._headers.running, checksum, place, part, text)
        return self._far.call(said, self._headers.count)

    def _learn(self, key: Hashable, what: Hashable, spot: Spot) -> int:
        """Write the text of a new kind of call. Returns its number, shifted above the 32-bit checksum."""
        checksum = zlib.crc32(encoded(shown(what)))
        number = self._recorder.write(_said(what, spot), (what, spot))
        known = self._recorder.texts[key] = number << 32 | checksum
        return known


def _said(what: Hashable, spot: Spot) -> bytes:
    """Return the call and its source line as text."""
    return at_line(what, spot.place, TEXT_BYTES)

"""Calls are compared by default, as they are made: with those of ranks of this node, and of other nodes.

Of a lane among ranks of one node that a library connects by sockets each call's header (``flight.headers``)
is read by the others before they make theirs. Where ranks share the memory through which they send, what
carries the calls compares them itself. Ranks of other nodes are told of calls that they cannot expect
(``confirming``). With ``check="full"`` all are compared ahead.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from asynccoll.errors import CollectiveMismatchError
from asynccoll.flight import Headers, Recorder
from asynccoll.flight.layout import TEXT_BYTES
from asynccoll.health.checks import mismatch
from asynccoll.health.confirming import Announced
from asynccoll.plan.texts import shown

if TYPE_CHECKING:
    from asynccoll.health.confirming import Confirming
    from asynccoll.host.call_site import Spot
    from asynccoll.order.lane import Lane
    from asynccoll.transport.completion import Promise

__all__ = ["Compared"]


class Compared:
    """The calls of one lane. Used with the lane's lock held."""

    def __init__(
        self,
        lane: Lane,
        rank: int,
        recorder: Recorder,
        near: Mapping[int, memoryview],
        far: Confirming | None = None,
    ) -> None:
        """``near``: the recorders' memory of the ranks of this node."""
        self._far = far
        self._lane = lane
        self._rank = rank
        self._recorder = recorder
        self._headers = Headers(recorder, lane.records.number, lane.group.key, lane.key, near)
        self._headers.restart(lane.epoch)

    def restart(self, epoch: int) -> None:
        """Ranks are in step again, whatever each has called before."""
        self._headers.restart(epoch)
        if self._far is not None:
            self._far.restart(epoch)

    def call(
        self, what: Hashable, spot: Spot, place: int, part: int
    ) -> CollectiveMismatchError | Promise | None:
        """The call that is about to be made. What to raise instead, or to wait for first; None: make it.

        None, too, where it was asked before. A promise ends with the error that is to be raised, or without.
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
        text = lambda: _said(what, spot).decode(errors="replace")  # noqa: E731  # what it says
        said = Announced(self._headers.running, checksum, place, part, text)
        return self._far.call(said, self._headers.count)

    def _learn(self, key: Hashable, what: Hashable, spot: Spot) -> int:
        """A checksum of what it is, below the number of its text: kept for as long as that holds."""
        checksum = zlib.crc32(shown(what).encode())
        number = self._recorder.write(_said(what, spot), (what, spot))
        known = self._recorder.texts[key] = number << 32 | checksum
        return known


def _said(what: Hashable, spot: Spot) -> bytes:
    """What is called, and where: the line helps most, so it is what is kept of a long text."""
    said, line = shown(what).encode(), f" at {spot.place}".encode()
    if len(said) + len(line) > TEXT_BYTES:
        said = said[: max(0, TEXT_BYTES - len(line) - 3)] + b"..."
    return said + line

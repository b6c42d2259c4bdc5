"""Calls are compared by default: with those of all ranks whose flight recorder can be seen, as they are made.

Of a lane among ranks of one host that a library connects by sockets each call's header (``flight.headers``)
is read by the others before they make theirs. Where ranks share the memory through which they send, what
carries the calls compares them itself; with ``check="full"`` they are compared ahead.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from asynccoll.errors import CollectiveMismatchError
from asynccoll.flight import Headers, Recorder
from asynccoll.flight.layout import TEXT_BYTES
from asynccoll.health.checks import mismatch
from asynccoll.plan.texts import shown

if TYPE_CHECKING:
    from asynccoll.host.call_site import Spot
    from asynccoll.order.lane import Lane

__all__ = ["Compared"]


class Compared:
    """The calls of one lane. Used with the lane's lock held."""

    def __init__(self, lane: Lane, rank: int, recorder: Recorder, others: Mapping[int, memoryview]) -> None:
        self._lane = lane
        self._rank = rank
        self._recorder = recorder
        self._headers = Headers(recorder, lane.number, lane.group.key, lane.key, others)
        self._headers.restart(lane.epoch)

    def restart(self, epoch: int) -> None:
        """Ranks are in step again, whatever each has called before."""
        self._headers.restart(epoch)

    def error(self, what: Hashable, spot: Spot, place: int, part: int) -> CollectiveMismatchError | None:
        """What to raise instead of the call that is about to be made; None if nobody calls another one."""
        key = (what, id(spot.code), spot.instruction)
        known = self._recorder.texts.get(key) or self._learn(key, what, spot)
        differ = self._headers.write(known & 0xFFFFFFFF, known >> 32, place, part)
        if not differ:
            return None
        texts = {rank: self._headers.text(rank) for rank in differ}
        texts[self._rank] = _said(what, spot).decode(errors="replace")
        ranks = sorted(texts)
        return mismatch(self._lane, ranks, [texts[rank] for rank in ranks])

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

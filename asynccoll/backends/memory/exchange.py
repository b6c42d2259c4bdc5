"""One collective in flight, which its engine carries through the slots.

What a step puts into a slot and takes from the others' is a subclass's (``exchanges``). Every method that the
engine calls may be called again for the same step, after an interrupt, and must come to the same.
"""

from __future__ import annotations

from collections.abc import Callable

from asynccoll.backends.memory.flight import Carrier, InFlight
from asynccoll.errors import CollectiveError

__all__ = ["Call", "Exchange"]


#: What a call is: a checksum (ranks whose checksums differ have made different calls), the text that shows
#: it, its place in the lane's order, and whether it is a part of what has that place; and who is told, later
#: and elsewhere, where ranks differ about it and more than this call may depend on it.
Call = tuple[int, bytes, int, bool, Callable[[int, CollectiveError], object]]


class Exchange(InFlight):
    """A call that takes ``steps`` steps; None: as many as the rank needs that needs most, which all tell."""

    __slots__ = (
        "checksum",
        "combined",
        "disagreed",
        "first",
        "is_long",
        "place",
        "shares",
        "steps",
        "text",
        "verified",
    )

    #: steps are combined by each rank in part, before they are taken
    combines = False
    #: the ranks must tell each other how much there is
    has_length = False

    def __init__(self, engine: Carrier, call: Call, steps: int | None) -> None:
        super().__init__(engine)
        self.checksum: int
        self.text: bytes
        self.place: int
        self.shares: bool
        self.disagreed: Callable[[int, CollectiveError], object]
        self.checksum, self.text, self.place, self.shares, self.disagreed = call
        self.steps: int | None = steps
        #: it takes more than one step, as far as this rank knows
        self.is_long: bool = steps != 1
        #: its first step, once that is posted
        self.first: int = 0
        self.combined: int = 0
        #: all ranks have made this very call
        self.verified: bool = False

    # What the engine asks for

    def length(self) -> int:
        """What the others must know before they can take."""
        return 0

    def agreed(self, lengths: list[int], slot: int) -> None:
        """All ranks have made this call, with these lengths, in that slot: now ``steps`` is known.

        What it raises, it raises on every rank.
        """

    def put(self, step: int, slot: int) -> None:
        """Copy what belongs to that step into this rank's slot."""

    def combine(self, step: int, slot: int) -> None:
        """Reduce this rank's part of that step; every rank has put its data."""

    def take(self, step: int, slot: int) -> None:
        """Read what belongs to that step from the others' slots; every rank has put, and combined, it."""

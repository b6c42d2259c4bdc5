"""One collective in flight, which its engine carries through the slots.

Subclasses (``exchanges``) say what a step puts into this rank's slot and takes from the others'. After an
interrupt the engine may call each method again for the same step, and the result must be the same.
"""

from __future__ import annotations

from collections.abc import Callable

from asynccoll.backends.memory.flight import Carrier, InFlight
from asynccoll.errors import CollectiveError

#: What a call is: its checksum (ranks whose checksums differ have made different calls), the text that shows
#: it, its place (its number in the lane's order), and whether other parts share that place. The function is
#: called, on a thread that may wait, if ranks differ about the call and further parts may depend on it.
Call = tuple[int, bytes, int, bool, Callable[[int, CollectiveError], object]]


class Exchange(InFlight):
    """A call that takes ``steps`` steps.

    If ``steps`` is None, each rank tells the others how many it needs, and the call takes the most of these.
    """

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

    #: whether each rank reduces (combines) a part of each step before any rank takes the step
    combines = False
    #: whether the ranks must tell each other how many steps they need
    has_length = False

    checksum: int
    text: bytes
    place: int
    shares: bool
    disagreed: Callable[[int, CollectiveError], object]

    def __init__(self, engine: Carrier, call: Call, steps: int | None) -> None:
        super().__init__(engine)
        self.checksum, self.text, self.place, self.shares, self.disagreed = call
        self.steps: int | None = steps
        #: whether it takes more than one step, as far as this rank knows
        self.is_long: bool = steps != 1
        #: the lane's step with which it began, once that is posted; else 0
        self.first: int = 0
        #: how many of its steps this rank has combined
        self.combined: int = 0
        #: whether all ranks are known to have made this very call
        self.verified: bool = False

    # What the engine calls. ``step`` counts from the call's first one.

    def length(self) -> int:
        """Return how many steps this rank needs, if ``has_length``."""
        return 0

    def agreed(self, lengths: list[int], slot: int) -> None:
        """Set ``steps``: all ranks have made this call, and need ``lengths`` steps.

        An error that this raises is raised on every rank.
        """

    def put(self, step: int, slot: int) -> None:
        """Copy this rank's data for that step into its slot."""

    def combine(self, step: int, slot: int) -> None:
        """Reduce this rank's part of that step; every rank has put its data."""

    def take(self, step: int, slot: int) -> None:
        """Read that step's data from the others' slots; every rank has put (and combined) its own."""

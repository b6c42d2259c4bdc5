"""What became of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asynccoll.errors import AbortedError, PeerLostError, PeerRefusedError
from asynccoll.testing.threads import Event
from asynccoll.trace import Timeline

__all__ = ["Report", "leaves"]

#: What a rank raises because of another one.
_CONSEQUENCES = (AbortedError, PeerLostError, PeerRefusedError)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of them, or the one."""
    parts = getattr(error, "exceptions", None)
    return [error] if parts is None else [leaf for part in parts for leaf in leaves(part)]


@dataclass
class Report:
    """What became of a simulation."""

    seed: int
    #: by rank: what ``main`` returned
    results: dict[int, Any] = field(default_factory=dict)
    #: by rank: what it raised; of a killed rank nothing
    errors: dict[int, BaseException] = field(default_factory=dict)
    #: the ranks that were killed
    killed: list[int] = field(default_factory=list)
    #: why it stopped before all ranks had ended, and where everybody stood; None if they have
    deadlock: str | None = None
    #: calls of the transport that could not have worked: ranks that made different ones
    mismatches: list[str] = field(default_factory=list)
    #: the calls of the transport, faults and errors, in order; at most 100,000
    events: list[Event] = field(default_factory=list)
    #: by rank: what it did when, as ``ac.trace.recording`` has it; in simulated seconds
    timelines: dict[int, Timeline] = field(default_factory=dict)
    virtual_seconds: float = 0.0
    #: the longest that a thread waited for another one, on a lock or an event, until its time was up: where
    #: nothing goes wrong and calls take milliseconds, a tenth of a second means that a wake-up was lost
    longest_timeout: float = 0.0
    #: switch points, and how often another thread went on
    steps: int = 0
    switches: int = 0
    #: where another thread than the first that could have gone on did: for ``Replay``
    taken: dict[int, int] = field(default_factory=dict, repr=False)
    #: equal for equal simulations
    digest: str = ""

    def check(self) -> None:
        """Raise AssertionError if a rank raised, nobody could go on, or calls did not match."""
        if self.errors:
            rank, error = self.first_cause()
            said = "; ".join(f"{one!r}" for one in leaves(error))
            raise AssertionError(f"seed {self.seed}: rank {rank} raised {said}") from error
        if self.deadlock is not None:
            raise AssertionError(f"seed {self.seed}: {self.deadlock}")
        if self.mismatches:
            raise AssertionError(f"seed {self.seed}: {self.mismatches[0]}")

    def first_cause(self) -> tuple[int, BaseException]:
        """The first rank that raised something of its own, and what; else the first that raised at all."""

        def order(rank: int) -> tuple[bool, int]:
            return all(isinstance(leaf, _CONSEQUENCES) for leaf in leaves(self.errors[rank])), rank

        rank = min(self.errors, key=order)
        return rank, self.errors[rank]

"""What became of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asynccoll.testing.scheduler import Event
from asynccoll.trace import Timeline

__all__ = ["Report"]


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
            rank, error = min(self.errors.items(), key=lambda item: item[0])
            raise AssertionError(f"seed {self.seed}: rank {rank} raised {error!r}") from error
        if self.deadlock is not None:
            raise AssertionError(f"seed {self.seed}: {self.deadlock}")
        if self.mismatches:
            raise AssertionError(f"seed {self.seed}: {self.mismatches[0]}")

"""The outcome of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from asynccoll.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
    PeerRefusedError,
)
from asynccoll.host.endings import leaves
from asynccoll.testing.strays import Stray, told
from asynccoll.testing.threads import Event
from asynccoll.trace import Timeline

__all__ = ["Report"]

_CONSEQUENCES = (AbortedError, PeerLostError, PeerRefusedError)
#: How many ranks' errors are shown; those of the others say the same.
_MOST_TOLD = 8


def _follows(error: BaseException) -> bool:
    """Whether a rank raises it because of another rank; so do timeouts of calls that all ranks have made."""
    late = isinstance(error, CollectiveTimeoutError) and not error.ranks
    return late or isinstance(error, _CONSEQUENCES)


def _raised(rank: int, error: BaseException) -> str:
    """Return what a rank raised, with a line for each clause of a long text."""
    told = str(error).replace("; ", ";\n    ")
    return f"rank {rank} raised {type(error).__name__}: {told}"


@dataclass
class Report:
    """The outcome of a simulation."""

    seed: int
    #: by rank: what ``main`` returned
    results: dict[int, Any] = field(default_factory=dict)
    #: by rank: what it raised, in the order in which ranks raised; nothing for a killed rank
    errors: dict[int, BaseException] = field(default_factory=dict)
    #: the ranks that were killed
    killed: list[int] = field(default_factory=list)
    #: why the simulation stopped before all ranks had ended, and where each thread was; None if all ended,
    #: even if by errors such as timeouts of calls
    deadlock: str | None = None
    #: calls of the transport that could not have worked, as ranks made different ones
    mismatches: list[str] = field(default_factory=list)
    #: calls that were paired although ranks made them from different lines: a branch of the program may
    #: intend that; otherwise a rank has skipped a call, and results mix different ones
    strays: list[Stray] = field(default_factory=list)
    #: the calls of the transport, faults and errors, in order; at most 100,000
    events: list[Event] = field(default_factory=list)
    #: by rank: what it did when, as from ``ac.trace.recording``, in simulated seconds
    timelines: dict[int, Timeline] = field(default_factory=dict)
    virtual_seconds: float = 0.0
    #: the longest wait of a thread for another one, on a lock or an event, that timed out: where nothing goes
    #: wrong and calls take milliseconds, a tenth of a second means that a wakeup was lost
    longest_timeout: float = 0.0
    #: the number of switch points, and how often the running thread changed
    steps: int = 0
    switches: int = 0
    #: the turns at which a thread other than the default one ran: for ``Replay``
    taken: dict[int, int] = field(default_factory=dict, repr=False)
    #: equal for equal simulations
    digest: str = ""

    def check(self, *, faults: bool = False) -> None:
        """Raise AssertionError if a rank raised, the simulation did not end, or calls did not match.

        ``faults``: ranks may raise what a fault causes: ``CollectiveError``, a cancellation, Ctrl-C.

        The error says what each rank raised, the cause first; if many did, only the first ones are shown.
        Calls that were paired although made from different lines come last.
        """
        if faults:
            rest = {
                rank: error for rank, error in self.errors.items() if not all(map(_is_told, leaves(error)))
            }
            replace(self, errors=rest).check()
        elif wrong := self._wrong():
            raise AssertionError(self._told(wrong)) from (self.first_cause()[1] if self.errors else None)

    def __str__(self) -> str:
        """Return what ``check`` says, or the results if nothing is wrong."""
        results = dict(sorted(self.results.items()))
        well = f"{len(results)} ranks ended after {self.virtual_seconds:.3g} simulated seconds: {results}"
        return self._told(self._wrong() or well)

    def _wrong(self) -> str:
        """Return what went wrong first; "" if nothing did."""
        if self.errors:
            ranks = self._from_the_cause()
            raised = [_raised(rank, one) for rank in ranks[:_MOST_TOLD] for one in leaves(self.errors[rank])]
            if len(ranks) > _MOST_TOLD:
                raised.append(f"and {len(ranks) - _MOST_TOLD} more ranks raised: see report.errors")
            return "\n".join(raised)
        return self.deadlock or next(iter(self.mismatches), "")

    def _told(self, wrong: str) -> str:
        strays = told(self.strays, wrong)
        return f"seed {self.seed}: {wrong}" + (f"\n{strays}" if strays else "")

    def first_cause(self) -> tuple[int, BaseException]:
        """Return the first rank to raise an error of its own, else the first to raise any, and the error."""
        rank = self._from_the_cause()[0]
        return rank, self.errors[rank]

    def _from_the_cause(self) -> list[int]:
        """Return the ranks that raised, in that order, with those that did because of another rank last."""
        return sorted(self.errors, key=lambda rank: all(map(_follows, leaves(self.errors[rank]))))


def _is_told(error: BaseException) -> bool:
    """Whether ``error`` is what a rank gets when another rank, or the user, has ended its work."""
    return isinstance(error, (CollectiveError, KeyboardInterrupt)) or type(error).__name__.startswith(
        "Cancel"
    )

"""What goes wrong in a simulated world, and when."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault", "Kill"]


@dataclass(frozen=True)
class Kill:
    """The process of ``rank`` is killed: when it makes call number ``after_call``, or ``at`` so many seconds.

    Calls are those of the transport, counted from 1: one all_reduce of a tensor is one.
    """

    rank: int
    after_call: int | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if (self.after_call is None) == (self.at is None):
            raise ValueError(f"Kill({self.rank}) needs after_call= or at=, one of them")


Fault = Kill

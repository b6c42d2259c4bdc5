"""Shrinks a simulation that went wrong, until a time limit: to fewer ranks, faults and switches.

What is left still goes wrong in the same way: with the same kind of error, on any rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asynccoll.testing.faults import Fault
from asynccoll.testing.schedules import Replay
from asynccoll.testing.strays import Stray

__all__ = ["Case", "Tried", "smallest"]

#: How many seeds are tried for each smaller number of ranks.
_SEEDS_OF_FEWER = 25


@dataclass(frozen=True)
class Case:
    """What was simulated; ``schedule`` is None for the one that ``explore`` chooses."""

    world_size: int
    seed: int
    faults: tuple[Fault, ...]
    schedule: Any = None


@dataclass(frozen=True)
class Tried:
    """The outcome of a case: what was wrong, if anything, of which kind, and ``Report.taken``.

    ``strays`` are the calls that were paired although made from different lines. ``printed`` is what the
    ranks printed to standard output, if it was captured.
    """

    wrong: str | None
    kind: str = ""
    taken: dict[int, int] | None = None
    strays: tuple[Stray, ...] = ()
    printed: str = ""


def smallest(
    case: Case, failed: Tried, look: Callable[[Case], Tried], seconds: float, sizes: Sequence[int]
) -> tuple[Case, Tried]:
    """Return the smallest case that still fails, of those tried within ``seconds``, and its outcome.

    ``sizes`` are the smaller numbers of ranks to try.
    """
    return _Shrinking(look, failed.kind, time.monotonic() + seconds, sizes).of(case, failed)


class _Shrinking:
    """One search for a smaller case."""

    def __init__(
        self, look: Callable[[Case], Tried], kind: str, deadline: float, sizes: Sequence[int]
    ) -> None:
        self._look = look
        self._sizes = sizes
        self._kind = kind
        self._deadline = deadline

    def of(self, case: Case, failed: Tried) -> tuple[Case, Tried]:
        """Remove faults first, as they name ranks; then ranks, as with fewer of them the rest is quicker."""
        for step in (self._fewer_faults, self._fewer_ranks, self._fewer_switches):
            case, failed = step(case, failed)
        return case, failed

    def _still(self, case: Case) -> Tried | None:
        if time.monotonic() > self._deadline:
            return None
        tried = self._look(case)
        return tried if tried.wrong is not None and tried.kind == self._kind else None

    def _fewer_ranks(self, case: Case, failed: Tried) -> tuple[Case, Tried]:
        for size in self._sizes:
            if any(fault.struck >= size for fault in case.faults):
                continue
            for seed in range(case.seed, case.seed + _SEEDS_OF_FEWER):
                smaller = replace(case, world_size=size, seed=seed)
                if (tried := self._still(smaller)) is not None:
                    return smaller, tried
        return case, failed

    def _fewer_faults(self, case: Case, failed: Tried) -> tuple[Case, Tried]:
        for fault in case.faults:
            smaller = replace(case, faults=tuple(one for one in case.faults if one is not fault))
            if (tried := self._still(smaller)) is not None:
                case, failed = smaller, tried
        return case, failed

    def _fewer_switches(self, case: Case, failed: Tried) -> tuple[Case, Tried]:
        """Leave out halves of the switches, then quarters, and so on (Zeller's ddmin, 2002)."""
        left = dict(failed.taken or {})
        written = replace(case, schedule=Replay(left))
        tried = self._still(written)
        if tried is None:  # time is up, or the replay does not fail in the same way
            return case, failed
        case, failed, parts = written, tried, 2
        while left and time.monotonic() < self._deadline:
            for fewer in _without_a_part(left, parts):
                smaller = replace(case, schedule=Replay(fewer))
                if (tried := self._still(smaller)) is not None:
                    case, failed, left, parts = smaller, tried, fewer, max(2, parts - 1)
                    break
            else:
                if parts >= len(left):
                    break
                parts = min(len(left), 2 * parts)
        return case, failed


def _without_a_part(taken: dict[int, int], parts: int) -> Iterator[dict[int, int]]:
    turns = list(taken)
    for part in range(parts):
        out = set(turns[part * len(turns) // parts : (part + 1) * len(turns) // parts])
        if out:
            yield {turn: number for turn, number in taken.items() if turn not in out}

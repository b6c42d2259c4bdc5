"""How long each rank is in each phase of a step, and in which of them one takes longer than the others.

A phase is a mark, or the time between two: ``between optimizer and forward``. What a rank is doing while
others wait for it does not show what made it late: all ranks may take 60 ms for the backward pass in which
they make the call, while the late one took 30 ms longer to load its batch.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from asynccoll.trace.parts import Part
from asynccoll.trace.spans import Interval, covered, gaps, intersection, length, within

#: A phase explains why a rank is late if the rank takes longer in it by at least this share of its lateness.
_FAIR_SHARE = 0.25
#: A phase lies within another one, and takes longer by as much, from this share on: then it says more.
_ALIKE = 0.9

#: By step: seconds in each phase. The time after the last step counts as one more step.
_Spent = Sequence[Mapping[str, float]]


class Phases:
    """The phases of all ranks of a recording."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._when = {part.rank: _phases(part) for part in parts}
        self._marks = {span.name for part in parts for span in part.spans if not span.is_operation}
        self._whole = {part.rank: _spent(part, self._when[part.rank]) for part in parts}
        self._alone = {part.rank: _spent(part, _alone(part, self._when[part.rank])) for part in parts}

    def longer(self, rank: int, steps: Iterable[int], seconds: float) -> str:
        """Return the phase in which ``rank`` takes longer than the others in ``steps``.

        "" if none explains that it was late by ``seconds``. If it is slow in the phase in which the others
        wait for it, all ranks are in that phase for as long: then only time with nothing in flight counts.
        """
        told = list(steps)
        for spent in (self._whole, self._alone):
            more = _more(rank, told, spent, self._marks)
            most = max(more, key=lambda name: more[name], default="")
            if most and more[most] > 0.0 and more[most] >= _FAIR_SHARE * seconds:
                return self._innermost(rank, most, more)
        return ""

    def _innermost(self, rank: int, outer: str, more: Mapping[str, float]) -> str:
        """Return the shortest phase within ``outer`` that takes longer by as much."""
        when = self._when[rank]
        inner = [
            name
            for name, by in more.items()
            if by >= _ALIKE * more[outer]
            and length(intersection(when[name], when[outer])) >= _ALIKE * length(when[name])
        ]
        return min(inner, key=lambda name: length(when[name]))


def _more(
    rank: int, steps: Iterable[int], spent: Mapping[int, _Spent], marks: Container[str]
) -> dict[str, float]:
    """Return by how much longer in total ``rank`` is in each phase than the median of the other ranks.

    A gap between two marks that no other rank has (they have another mark in between) is left out, as it is
    unknown how long it usually takes.
    """
    more: dict[str, float] = {}
    others = [of for whose, of in spent.items() if whose != rank]
    for step in steps:
        known = [of[step] for of in others if step < len(of)]
        for name, seconds in spent[rank][step].items():
            if known and (name in marks or any(name in of for of in known)):
                usual = statistics.median(of.get(name, 0.0) for of in known)
                more[name] = more.get(name, 0.0) + seconds - usual
    return more


def _phases(part: Part) -> dict[str, list[Interval]]:
    """Return when the rank was in which phase."""
    compute = [span for span in part.spans if not span.is_operation]
    marked: dict[str, list[Interval]] = {}
    for span in compute:
        marked.setdefault(span.name, []).append((span.start, part.end_of(span)))
    found = {name: covered(times) for name, times in marked.items()}
    for name, gap in _unmarked(part) if compute else ():
        found.setdefault(name, []).append(gap)
    return found


def _unmarked(part: Part) -> Iterator[tuple[str, Interval]]:
    """Yield the gaps between marks, named by the mark that ends before and the one that begins after."""
    compute = [span for span in part.spans if not span.is_operation]
    ended = sorted((part.end_of(span), span.name) for span in compute)
    starts = [span.start for span in compute]
    for start, end in gaps(covered((span.start, part.end_of(span)) for span in compute), part.seconds):
        before, behind = bisect_right(ended, start, key=lambda one: one[0]), bisect_left(starts, end)
        yield (
            _between(
                ended[before - 1][1] if before else "",
                compute[behind].name if behind < len(compute) else "",
            ),
            (start, end),
        )


def _between(before: str, behind: str) -> str:
    if before and behind:
        return f"between {before} and {behind}"
    return f"after {before}" if before else f"before {behind}" if behind else ""


def _alone(part: Part, phases: Mapping[str, Sequence[Interval]]) -> dict[str, list[Interval]]:
    """Return the times of ``phases`` in which nothing was in flight."""
    busy = covered((span.start, part.end_of(span)) for span in part.spans if span.is_operation)
    idle = gaps(busy, part.seconds)
    return {name: intersection(times, idle) for name, times in phases.items()}


def _spent(part: Part, phases: Mapping[str, Sequence[Interval]]) -> list[dict[str, float]]:
    bounds = [0.0, *part.steps, max(part.seconds, *part.steps, 0.0)]
    spent: list[dict[str, float]] = [{} for _ in bounds[1:]]
    for name, times in phases.items():
        for step, of_step in enumerate(spent):
            seconds = length(within(times, bounds[step], bounds[step + 1]))
            if seconds:
                of_step[name] = seconds
    return spent

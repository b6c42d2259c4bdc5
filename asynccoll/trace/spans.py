"""The bars of a timeline, and how they overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: When something begins and when it ends.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a timeline. Times are seconds since the recording began.

    ``end`` is None if the span had not ended when asked. ``row`` is the lane of an operation, or the thread
    (or chosen row) of a span of compute; ``size_bytes``, ``sequence`` and ``part`` (its place in its lane's
    order) and ``place`` (file and line) are those of the operation. For compute that was marked
    automatically, ``place`` is the class of the module or optimizer. ``peer`` is the other rank of a message,
    else -1. ``lane_key`` distinguishes lanes that had the same name one after another.
    """

    name: str
    row: str
    start: float
    end: float | None
    is_operation: bool = False
    size_bytes: int = 0
    sequence: int = 0
    place: str = ""
    part: int = 1
    peer: int = -1
    failed: bool = False
    lane_key: str = ""

    @property
    def key(self) -> tuple[str, str, str, int, int] | None:
        """What identifies an operation on all of its ranks; None for compute and messages."""
        if not self.is_operation or self.peer >= 0:
            return None
        return self.row, self.lane_key, self.name, self.sequence, self.part


def stack(spans: Sequence[Span]) -> list[tuple[str, list[list[Span]]]]:
    """Return the rows, compute first, each as tracks without overlaps. ``spans`` are sorted by start."""
    rows: dict[tuple[bool, str], list[list[Span]]] = {}
    for span in spans:
        tracks = rows.setdefault((span.is_operation, span.row), [])
        for track in tracks:
            last = track[-1].end
            if last is not None and last <= span.start:
                track.append(span)
                break
        else:
            tracks.append([span])
    return [(row, tracks) for (_, row), tracks in sorted(rows.items(), key=lambda item: item[0][0])]


def covered(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of ``intervals``, as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals, each disjoint and in order."""
    both = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            both.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return both


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Clip ``intervals``, disjoint and in order, to ``start`` and ``end``; does not visit those far off."""
    found = []
    for at in range(bisect_right(intervals, start, key=lambda one: one[1]), len(intervals)):
        if max(start, intervals[at][0]) >= end:
            break
        found.append((max(start, intervals[at][0]), min(end, intervals[at][1])))
    return found


def gaps(busy: Sequence[Interval], end: float) -> list[Interval]:
    """Return the gaps before, between and after ``busy``, disjoint and in order, from 0 to ``end``."""
    starts = [0.0, *(stop for _, stop in busy)]
    stops = [*(start for start, _ in busy), end]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)

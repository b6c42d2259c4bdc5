"""Ranks and their calls in readable form: what both ``where`` and ``trace diff`` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asynccoll.cli.output import Table, show
from asynccoll.host.call_number import numbered
from asynccoll.host.words import duration, enumerated, listed

if TYPE_CHECKING:
    from asynccoll.flight import Call, Flight, Parting

_WHATS = {
    "different": "ranks called different things",
    "refused": "some ranks refused what others called",
    "absent": "not all ranks have called",
}
call_columns: tuple[str, ...] = ("operation", "of", "lane", "called", "is", "line")


def call_cells(call: Call, now: float) -> tuple[str, ...]:
    """Return the cells of one call for ``call_columns``; ``now``: its rank's clock, 0.0 if unknown."""
    ago = f"{duration(max(0.0, now - call.called))} ago" if now else "-"
    return call.title, call.of or "-", call.lane, ago, call.state, call.place


def nobody(job: str | None) -> str:
    """Return what to say if no rank is found."""
    if job is None:
        return (
            "no rank of asynccoll runs on this host, or none that you may inspect; a job that failed has "
            "left dumps: asynccoll trace diff DIR, with the directory that the error names"
        )
    if job.isdigit():
        return (
            f"process {job} is not a rank of asynccoll and has started none, or none that has called "
            "ac.initialize() and that you may inspect"
        )
    return f"no rank of this host has joined a job at {job}"


def print_partings(partings: Sequence[Parting], recorded: Mapping[int, Flight]) -> bool:
    """Print where the ranks of ``recorded`` part, by lane, and which are missing; return whether they do."""
    from asynccoll.flight import unmet

    _print_partings(partings)
    messages = unmet(recorded)
    for one in messages:
        show(str(one))
    world_size = max((one.world_size for one in recorded.values()), default=0)
    unknown = sorted(set(range(world_size)) - recorded.keys())
    parts = bool(partings or messages)
    if not parts and len(recorded) > 1:
        what = "made the same calls" if any(one.calls for one in recorded.values()) else "have called nothing"
        show(f"{listed([*recorded])} {what}, as far as is recorded")
    elif not parts:
        show("fewer than two ranks are known: nothing to compare")
    if unknown:
        show(
            f"nothing is known about {listed(unknown)}: not in ac.initialize() yet, ended, or on a host "
            "that does not answer"
        )
    return parts


def _print_partings(partings: Sequence[Parting]) -> None:
    for one in partings:
        title = f"{one.where}: {_WHATS[one.kind]} at {numbered(one.agreed + 1)}"
        table = Table(("ranks", "what"), title=title, left=frozenset({"ranks", "what"}))
        table.rows += [(enumerated(who), text) for who, text in one.sides()]
        show(table)
        if one.hint:
            show(one.hint)

"""Ranks and their calls as people read them: what ``where`` and ``trace diff`` print alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from asynccoll.cli.output import Table, print_table

if TYPE_CHECKING:
    from asynccoll.flight import Call, Parting

__all__ = ["call_cells", "call_columns", "nobody", "print_partings"]

call_columns: tuple[str, ...] = ("operation", "of", "lane", "called", "is", "line")


def call_cells(call: Call, now: float) -> tuple[str, ...]:
    """One call under ``call_columns``; ``now``: its rank's clock, 0.0 if that is not known."""
    from asynccoll.trace.words import duration

    number = f" #{call.sequence}" if call.sequence else ""
    ago = f"{duration(max(0.0, now - call.called))} ago" if now else "-"
    return f"{call.operation}{number}", call.of or "-", call.lane, ago, call.state, call.place


def nobody(job: str | None) -> str:
    """What is said where no rank is found."""
    if job is None:
        return (
            "no rank of asynccoll runs on this host, or none that you may look into; of a job that failed "
            "there are dumps: asynccoll trace diff DIR, the directory that the error names"
        )
    if job.isdigit():
        return (
            f"process {job} is no rank of asynccoll and has started none, or none that has called "
            "ac.initialize() and that you may look into"
        )
    return f"no rank of this host has met at {job}"


def print_partings(partings: Iterable[Parting], ranks: Mapping[int, object]) -> bool:
    """Where ``ranks`` part, lane by lane; whether they do."""
    found = list(partings)
    if not found:
        print(
            f"the {len(ranks)} ranks called the same, as far as is recorded"
            if len(ranks) > 1
            else "there is one rank only: nothing to compare"
        )
        return False
    for one in found:
        what = "ranks called different things" if one.kind == "different" else "not all ranks have called"
        title = f"lane {one.lane!r}: {what} at #{one.agreed + 1}"
        table = Table(("ranks", "what"), title=title, left=frozenset({"ranks", "what"}))
        table.rows += [(", ".join(map(str, who)), text) for who, text in one.sides()]
        print_table(table)
    return True

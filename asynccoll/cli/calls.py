"""Ranks and their calls as people read them: what ``where`` and ``trace diff`` print alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from asynccoll.cli.output import Table, print_table

if TYPE_CHECKING:
    from asynccoll.flight import Call, Parting

__all__ = ["call_cells", "call_columns", "print_partings"]

call_columns: tuple[str, ...] = ("operation", "of", "lane", "called", "is", "line")


def call_cells(call: Call, now: float) -> tuple[str, ...]:
    """One call under ``call_columns``; ``now``: its rank's clock, 0.0 if that is not known."""
    from asynccoll.trace.words import duration

    number = f" #{call.sequence}" if call.sequence else ""
    ago = f"{duration(max(0.0, now - call.called))} ago" if now else "-"
    return f"{call.operation}{number}", call.of or "-", call.lane, ago, call.state, call.place


def print_partings(partings: Iterable[Parting], ranks: Mapping[int, object]) -> bool:
    """Where ``ranks`` part, lane by lane; whether they do."""
    found = list(partings)
    if not found:
        who = f"the {len(ranks)} ranks" if len(ranks) > 1 else "one rank only, which"
        print(
            f"{who} called the same, as far as is recorded"
            if len(ranks) > 1
            else f"there is {who} cannot part"
        )
        return False
    for one in found:
        what = "ranks called different things" if one.kind == "different" else "not all ranks have called"
        title = f"lane {one.lane!r}: {what} at #{one.agreed + 1}"
        table = Table(("ranks", "what"), title=title, left=frozenset({"ranks", "what"}))
        table.rows += [(", ".join(map(str, who)), text) for who, text in one.sides()]
        print_table(table)
    return True

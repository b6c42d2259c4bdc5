"""Tables as lines that fit a width: which columns are shown, how wide, and where words are folded.

Pure. Must not know where the lines go; ``output`` prints them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Line", "Table", "folded", "lines"]

_GAP = "  "


@dataclass(slots=True)
class Table:
    """Rows of short texts under ``columns``; those in ``left`` are words, the others numbers."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""
    left: frozenset[str] = frozenset()
    #: columns that are left out, the first of them first, where all of them together are too wide
    spare: tuple[str, ...] = ()
    #: rows that stand out on a terminal, by number: as they should be, and as they should not
    good: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: ``kind`` is ``title``, ``head``, ``good``, ``bad`` or nothing."""

    text: str
    kind: str = ""


def lines(table: Table, width: int | None = None) -> Iterator[Line]:
    """``table``, in ``width`` cells as far as it goes; None: as wide as it is."""
    shown = _shown(table, width)
    heads = [[table.columns[k] for k in shown]] if any(name.strip() for name in table.columns) else []
    rows = [*heads, *([row[k] for k in shown] for row in table.rows)]
    words = [table.columns[k] in table.left for k in shown]
    widths = _widths(rows, words, width)
    if table.title:
        yield from (Line(text, "title") for text in folded(table.title, width))
    for number, row in enumerate(rows, -len(heads)):
        kind = "head" if number < 0 else "good" * (number in table.good) or "bad" * (number in table.bad)
        for text in _row(row, widths, words):
            yield Line(text, kind)


def _row(row: Sequence[str], widths: Sequence[int], words: Sequence[bool]) -> Iterator[str]:
    """The lines of one row: as many as its most folded cell has."""
    cells = [folded(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, cells))):
        parts = (cell[number] if number < len(cell) else "" for cell in cells)
        yield _GAP.join(map(_padded, parts, widths, words)).rstrip()


def folded(text: str, width: int | None) -> list[str]:
    """``text`` in lines of ``width`` cells, broken behind spaces; words that are longer, behind slashes."""
    if width is None or _cells(text) <= width:
        return [text]
    found = [""]
    words = re.split(r"(?<=\s)(?=\S)", text)
    for piece in (part for word in words for part in ([word] if _cells(word) <= width else _pieces(word))):
        if found[-1] and _cells(found[-1] + piece.rstrip()) > width:
            found.append("")
        found[-1] += piece
    return [line.rstrip() for line in found]


def _pieces(text: str) -> list[str]:
    return re.split(r"(?<=[\s/])(?=[^\s/])", text)


def _shown(table: Table, width: int | None) -> list[int]:
    """The columns that there is room for, by number."""
    shown = list(range(len(table.columns)))
    spare = [table.columns.index(name) for name in table.spare]
    rows = [table.columns, *table.rows]
    while spare and width is not None and _total(_natural([row[k] for k in shown] for row in rows)) > width:
        shown.remove(spare.pop(0))
    return shown


def _natural(rows: Iterable[Sequence[str]]) -> list[int]:
    """Of each column: what it takes."""
    return [max(map(_cells, column)) for column in zip(*rows, strict=True)]


def _least(cell: str, words: bool) -> int:
    """The width that it has at least."""
    return max(_cells(piece.rstrip()) for piece in _pieces(cell)) if words else _cells(cell)


def _widths(rows: Sequence[Sequence[str]], words: Sequence[bool], width: int | None) -> list[int]:
    """Of each column: what it takes; where that is too much, the widest columns of words give way."""
    widths = _natural(rows)
    least = [
        max(_least(cell, words[k]) for cell in column) for k, column in enumerate(zip(*rows, strict=True))
    ]
    while width is not None and _total(widths) > width:
        room = [have - need for have, need in zip(widths, least, strict=True)]
        if not any(room):
            break
        widest = max((k for k, more in enumerate(room) if more), key=lambda k: widths[k])
        widths[widest] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _padded(text: str, width: int, words: bool) -> str:
    room = " " * (width - _cells(text))
    return text + room if words else room + text


def _cells(text: str) -> int:
    """How wide it is on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_cell(letter) for letter in text)


def _cell(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "FW" else 1

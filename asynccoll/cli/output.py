"""What a command prints: tables (drawn by rich on a terminal, plain text elsewhere), JSON, and bars.

rich is an extra (``pip install rich``); without it, or in a pipe, everything is plain text in the
same order. What a table says is the command's affair.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from asynccoll.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Bar",
    "Table",
    "add_json",
    "check_writable",
    "console",
    "from_here",
    "print_json",
    "print_table",
]


@dataclass(slots=True)
class Table:
    """Rows of short texts under ``columns``; those in ``left`` are words, the others numbers."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""
    left: frozenset[str] = frozenset()
    #: rows that stand out on a terminal, by number
    marked: set[int] = field(default_factory=set)


def console(file: TextIO | None = None) -> Console | None:
    """rich's console on ``file`` (standard output), if that is a terminal and rich is installed."""
    file = file or sys.stdout
    if not file.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=file, highlight=False)


def from_here(text: str) -> str:
    """``text`` with files below the working directory as they are called from there."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def check_writable(directory: Path) -> None:
    """Make it if it is not there: before what is to be written takes minutes.

    Raises:
        InvalidArgumentError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {str(directory)!r}: {error.strerror}") from error


def print_table(table: Table) -> None:
    """To standard output."""
    table.rows = [tuple(map(from_here, row)) for row in table.rows]
    screen = console()
    if screen is None:
        print("\n".join(plain_lines(table)), flush=True)
        return
    from rich import box
    from rich.markup import escape
    from rich.table import Table as Drawn

    drawn = Drawn(
        title=escape(table.title) or None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        show_header=any(name.strip() for name in table.columns),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in table.columns:
        words = name in table.left
        drawn.add_column(
            escape(name), justify="left" if words else "right", no_wrap=not words, overflow="fold"
        )
    for number, row in enumerate(table.rows):
        drawn.add_row(*map(escape, row), style="green" if number in table.marked else None)
    screen.print(drawn)


def plain_lines(table: Table) -> Iterable[str]:
    """The same as text, two spaces between columns."""
    heads = [list(table.columns)] if any(name.strip() for name in table.columns) else []
    lines = [*heads, *table.rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(table.columns))]
    if table.title:
        yield table.title
    for line in lines:
        cells = (
            f"{cell:<{width}}" if name in table.left else f"{cell:>{width}}"
            for cell, width, name in zip(line, widths, table.columns, strict=True)
        )
        yield "  ".join(cells).rstrip()


def add_json(parser: argparse.ArgumentParser, what: str = "one JSON document on standard output") -> None:
    """The option ``--json``, which every command that prints has."""
    parser.add_argument("--json", action="store_true", help=what)


def print_json(what: object) -> None:
    """One document, on standard output."""
    print(json.dumps(what, indent=2), flush=True)


class Bar:
    """How far something is, on standard error where somebody looks; else nothing."""

    _WIDTH = 30

    def __init__(self, total: int) -> None:
        self._total = max(1, total)
        self._looked_at = sys.stderr.isatty()
        self._shown = False

    def show(self, done: int, text: str) -> None:
        """``done`` of the total, and what to say beside it."""
        if not self._looked_at:
            return
        full = min(self._WIDTH, done * self._WIDTH // self._total)
        sys.stderr.write(f"\r[{'#' * full}{' ' * (self._WIDTH - full)}] {text}\x1b[K")
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        """Take it away, so that something else can be printed."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

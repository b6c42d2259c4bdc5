"""What a command prints: tables and sentences (fitted to a terminal's width), JSON, and progress bars.

In a pipe the same is plain text of any width. The command decides what a table says; rich lays it out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress
from rich.table import Table as Grid
from rich.text import Text

from asynccoll.errors import InvalidArgumentError

#: Wider than any line: a pipe has no width, but rich needs one.
_WIDE = 1 << 20
#: Between columns.
_GAP = 2
#: How often a bar is drawn.
_EVERY_SECONDS = 0.2
#: Words of a table are not cut up to this length, however narrow the terminal.
_WHOLE_WORD = 30


@dataclass(slots=True)
class Table:
    """Rows of short texts under ``columns``; those in ``left`` are words, the others numbers."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""
    left: frozenset[str] = frozenset()
    #: columns that are left out, in this order, as long as all columns together are too wide
    spare: tuple[str, ...] = ()
    #: the numbers of rows that are highlighted on a terminal: as good, and as bad
    good: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)


def from_here(text: str) -> str:
    """Return ``text`` with files below the working directory named relative to it."""
    return re.sub(rf"(?<![^\s'\"(]){re.escape(f'{Path.cwd()}{os.sep}')}", "", text)


def check_writable(directory: Path) -> None:
    """Check that ``directory`` can be written to, before the work takes minutes; make it if it is missing.

    Raises:
        InvalidArgumentError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {str(directory)!r}: {error.strerror}") from error


def show(*parts: Table | str) -> None:
    """Print tables and sentences to standard output: fitted to a terminal, with some rows in color."""
    for part in parts:
        console = _console()
        with console.capture() as captured:
            console.print(_drawn(console, part), crop=False)  # the terminal folds what is too wide
        # rich fills the cells of the last column with spaces
        print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def _console() -> Console:
    """Return a console for the current standard output, without a limit on width if it is not a terminal."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(width=width, markup=False, highlight=False, emoji=False)


def _drawn(console: Console, part: Table | str) -> RenderableType:
    return _table(console, part) if isinstance(part, Table) else _text(part)


def _text(said: str, style: str = "") -> Text:
    return Text(from_here(said), style)


def _table(console: Console, table: Table) -> Group:
    """Lay out a table with as many of its spare columns as there is room for."""
    columns = [
        _Column(name, [from_here(row[k]) for row in table.rows], name in table.left)
        for k, name in enumerate(table.columns)
    ]
    for name in table.spare:
        if _total(column.natural for column in columns) > console.width:
            columns = [column for column in columns if column.name != name]
    widths = _widths(columns, console.width)
    grid = Grid(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="underline",
        show_header=any(column.name.strip() for column in columns), width=_total(widths),
    )  # fmt: skip
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(
            column.name, justify="left" if column.words else "right", width=width, overflow="fold"
        )
    for number, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
        grid.add_row(*row, style="green" * (number in table.good) or "red" * (number in table.bad))
    return Group(*[_text(table.title, "bold")] * bool(table.title), grid)


@dataclass(slots=True)
class _Column:
    name: str
    cells: list[str]
    #: whether the cells are words, which may be folded
    words: bool

    @property
    def natural(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))

    @property
    def least(self) -> int:
        """The width at which no word of usual length is cut."""
        if not self.words:
            return self.natural
        words = (word for cell in (self.name, *self.cells) for word in cell.split())
        return min(max(map(cell_len, words), default=0), _WHOLE_WORD)


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Return widths that fit: the widest columns that can be folded shrink; rich would cut every word."""
    widths = [column.natural for column in columns]
    while _total(widths) > room:
        give = [k for k, column in enumerate(columns) if widths[k] > column.least]
        if not give:
            break
        widths[max(give, key=widths.__getitem__)] -= 1
    return widths


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def add_json(parser: argparse.ArgumentParser, what: str = "one JSON document on standard output") -> None:
    """Add the option ``--json``, which every command that prints has."""
    parser.add_argument("--json", action="store_true", help=what)


def print_json(what: object, *, in_a_line: bool = False) -> None:
    """Print one document on standard output; in one line if others follow, so that a reader finds its end."""
    print(json.dumps(what, indent=None if in_a_line else 2), flush=True)


@contextmanager
def standard_output_for_json() -> Iterator[None]:
    """Send to stderr what this process and its children print within the block: JSON must stand alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class Screen:
    """A region of the terminal that is redrawn each time; the last drawing stays."""

    def __init__(self) -> None:
        self._live = Live(console=_console(), auto_refresh=False)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def show(self, *parts: Table | str) -> None:
        """Draw ``parts``, as many lines of them as there is room for."""
        drawn = Group(*(_drawn(self._live.console, part) for part in parts))
        self._live.update(drawn, refresh=True)


class Bar:
    """A progress bar on standard error if that is a terminal; else nothing."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True, markup=False, highlight=False)
        self._progress = Progress(
            BarColumn(), "{task.description}",
            console=console, transient=True, auto_refresh=False, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=max(1, total))
        self._shown = 0.0

    def show(self, done: int, text: str) -> None:
        """Show ``done`` of the total, with ``text`` next to the bar; at most a few times a second."""
        if time.monotonic() - self._shown > _EVERY_SECONDS:
            self._shown = time.monotonic()
            self._progress.start()
            self._progress.update(self._task, completed=done, description=text, refresh=True)

    def clear(self) -> None:
        """Remove the bar, so that something else can be printed."""
        self._progress.stop()

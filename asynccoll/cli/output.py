"""What a command prints: tables and sentences (on a terminal they fit it), JSON, and bars.

In a pipe the same is plain text, as wide as it is. What a table says is the command's affair, how it is laid
out that of ``layout``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asynccoll.cli.layout import Line, Table, folded, lines
from asynccoll.errors import InvalidArgumentError

__all__ = [
    "Bar",
    "Screen",
    "Table",
    "add_json",
    "check_writable",
    "from_here",
    "print_json",
    "print_table",
    "print_text",
    "table_lines",
    "text_lines",
]

#: How lines stand out on a terminal.
_STYLES = {"title": "\x1b[1m", "head": "\x1b[4m", "good": "\x1b[32m", "bad": "\x1b[31m"}


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
    """To standard output; on a terminal as wide as that is, and with colour."""
    print("\n".join(table_lines(table)), flush=True)


def table_lines(table: Table) -> list[str]:
    """What ``print_table`` prints."""
    table.rows = [tuple(map(from_here, row)) for row in table.rows]
    return [_styled(line) for line in lines(table, _width())]


def print_text(text: str) -> None:
    """A sentence or several, to standard output; on a terminal folded between words."""
    print("\n".join(text_lines(text)), flush=True)


def text_lines(text: str) -> list[str]:
    """What ``print_text`` prints."""
    return [line for said in from_here(text).split("\n") for line in folded(said, _width())]


def _width() -> int | None:
    """Of the terminal that standard output is; None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _styled(line: Line) -> str:
    """With the terminal's codes, where there is one that takes them and nobody minds (https://no-color.org)."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return line.text if plain or not line.kind else f"{_STYLES[line.kind]}{line.text}\x1b[0m"


def add_json(parser: argparse.ArgumentParser, what: str = "one JSON document on standard output") -> None:
    """The option ``--json``, which every command that prints has."""
    parser.add_argument("--json", action="store_true", help=what)


def print_json(what: object) -> None:
    """One document, on standard output."""
    print(json.dumps(what, indent=2), flush=True)


class Screen:
    """The terminal that standard output is, filled anew each time."""

    def __init__(self) -> None:
        sys.stdout.write("\x1b[2J")

    def show(self, rows: Sequence[str], notes: Sequence[str]) -> None:
        """``rows`` from the top, as many as there is room for beside ``notes``, which stand below."""
        below = [line for note in notes for line in text_lines(note)]
        room = max(1, shutil.get_terminal_size().lines - 1 - len(below))
        above = (
            list(rows) if len(rows) <= room else [*rows[: room - 1], f"... {len(rows) - room + 1} lines more"]
        )
        shown = "".join(f"{line}\x1b[K\r\n" for line in [*above, *below])
        sys.stdout.write(f"\x1b[H{shown}\x1b[J")
        sys.stdout.flush()


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

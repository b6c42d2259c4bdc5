"""What all commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

#: The exit code for a wrong command line.
USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """A parser whose help and usage errors end with an example."""

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        """``example``: a command line that can be typed as it is, or with other names."""
        super().__init__(*args, **options)
        self._example = f"\nexample: {example}\n" if example else ""

    def format_help(self) -> str:
        """Return the help, with the example at its end."""
        return super().format_help() + self._example

    def error(self, message: str) -> NoReturn:
        """Print the usage, what is wrong and an example, and exit."""
        self.exit(USAGE_ERROR, f"{self.format_usage()}{self.prog}: error: {message}{self._example}\n")


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option whose value is a whole number of at least ``least``."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is not possible; it must be at least {least}")
        return value

    return number


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # argparse has no public name for it

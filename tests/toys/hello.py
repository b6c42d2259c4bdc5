"""``asynccoll hello``: an example of a command."""

from __future__ import annotations

import argparse

from asynccoll.cli.common import Commands


def add(commands: Commands) -> None:
    parser = commands.add_parser("hello", help="say hello")
    parser.add_argument("name")
    parser.set_defaults(carry_out=_hello)


def _hello(given: argparse.Namespace) -> int:
    print(f"hello {given.name}")
    return 0

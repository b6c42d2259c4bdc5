"""``asynccoll info``: versions, backends, launcher and devices."""

from __future__ import annotations

import argparse
import json

from asynccoll import __version__, available_backends
from asynccoll.cli.common import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    parser = commands.add_parser("info", help="versions, backends, launcher and devices")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(carry_out=_info)


def _info(given: argparse.Namespace) -> int:
    from asynccoll.cli.describe import collect

    found = collect(__version__, available_backends)
    if given.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value}")
    return 0

"""Looks up and carries out one command line; an error of ours becomes one line and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from asynccoll import __version__
from asynccoll.cli import bench, explain, explore, info, run, top, trace, where
from asynccoll.cli.common import USAGE_ERROR, Parser
from asynccoll.errors import AsyncCollError

#: In the order in which ``--help`` shows them.
COMMANDS = (run, info, top, where, trace, bench, explain, explore)


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line and return the exit code."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    given = parser.parse_args(argv)
    try:
        code: int = given.carry_out(given)
    except AsyncCollError as error:
        print(f"asynccoll: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone; nothing more may be flushed into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="asynccoll",
        example="asynccoll run -n 2 train.py",
        description="Awaitable collectives for PyTorch.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asynccoll {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser

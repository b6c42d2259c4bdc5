"""``asynccoll info``: versions, launcher and devices; and for each backend whether it works here."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from asynccoll import __version__
from asynccoll.cli.common import Commands
from asynccoll.cli.output import Table, add_json, print_json, show

__all__ = ["add"]


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, launcher, devices, and which backends work here",
        example="asynccoll info --no-try",
        description="Each backend whose packages are installed is tried: a world of one, in a process of "
        "its own.",
    )
    parser.add_argument("--no-try", action="store_true", help="only check which packages are installed")
    add_json(parser)
    parser.set_defaults(carry_out=_info)


def _info(given: argparse.Namespace) -> int:
    from asynccoll.cli.describe import collect
    from asynccoll.cli.trials import look, try_all

    found = collect(__version__)
    if not given.json:
        show(Table(("", " "), list(found.items()), left=frozenset({"", " "})))
        print(flush=True)
    trials = look() if given.no_try else try_all()
    if given.json:
        print_json({**found, "backends": {name: asdict(trial) for name, trial in trials.items()}})
        return 0
    columns = ("backend", "works", "why not", "what to type")
    table = Table(columns, left=frozenset(columns))
    for name, trial in trials.items():
        table.good |= {len(table.rows)} if trial.works else set()
        table.rows.append((name, "yes" if trial.works else "no", trial.why, trial.do))
    show(table)
    return 0

"""``asynccoll explore``: a function on simulated ranks, in many orders, until one goes wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING

from asynccoll.cli.common import Commands, at_least
from asynccoll.cli.output import Bar, add_json, print_json, show

if TYPE_CHECKING:
    from asynccoll.testing import Exploration

#: How many files are named, and how many entries of a directory are looked at.
_MOST_FILES, _MOST_ENTRIES = 3, 1000


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "explore",
        help="run a function on simulated ranks, in many orders, until one goes wrong",
        example="asynccoll explore test_loop.py::main --seeds 500 -n 3",
        description="Runs main(rank), or main(), on simulated ranks, in one process for each job. Each "
        "seed is another order of threads, tasks and messages. The first that goes wrong is shrunk and "
        "shown as a program.",
    )
    parser.add_argument("target", metavar="FILE::FUNCTION", help="such as test_loop.py::main")
    parser.add_argument("--seeds", type=at_least(1), default=1000, metavar="N", help="how many, default 1000")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of them, default 0")
    parser.add_argument("-n", "--world-size", type=int, default=3, metavar="N", help="ranks, default 3")
    parser.add_argument(
        "--jobs", type=at_least(0), default=0, metavar="N", help="processes, default one for each core"
    )
    parser.add_argument("--loop", default="asyncio", metavar="NAME", help="asyncio, trio or none")
    parser.add_argument(
        "--transport", default="gloo", metavar="NAME", help="gloo, memory, mpi, horovod, xla or nccl"
    )
    parser.add_argument(
        "--faults", default="", metavar="KIND,...", help="one of these for each seed: kill, silence, stop, "
        "stall, delay, cancel, interrupt, store, collect, fail"
    )  # fmt: skip
    parser.add_argument(
        "--statements", action="append", default=[], metavar="MODULE",
        help="also switch threads before each of its statements",
    )  # fmt: skip
    parser.add_argument(
        "--expect", default="", metavar="FILE::FUNCTION",
        help="called with the report of each seed; raises AssertionError if it is not as it should be",
    )  # fmt: skip
    parser.add_argument(
        "--not-joined",
        action="store_true",
        help="the function calls ac.initialize() itself, as a script does",
    )
    parser.add_argument(
        "--lines",
        default="any",
        metavar="WHICH",
        help="same: pairing calls that ranks make from different lines is an error",
    )
    parser.add_argument(
        "-s", "--show-prints", action="store_true",
        help="show what ranks print in every schedule, not only in the one that goes wrong",
    )  # fmt: skip
    parser.add_argument("--shrink", type=float, default=30.0, metavar="SECONDS", help="default 30")
    add_json(parser)
    parser.set_defaults(carry_out=_explore)


def _explore(given: argparse.Namespace) -> int:
    from asynccoll.testing.exploration import Exploration

    found, bar, before = Exploration(), Bar(given.seeds), _files()

    def progress(now: Exploration) -> None:
        nonlocal found
        found = now
        pace = now.schedules / max(now.seconds, 1e-9)
        bar.show(now.schedules, f"{now.schedules:,} of {given.seeds:,}, {pace:.0f}/s")

    try:
        try:
            found = _explored(given, progress)
        finally:
            bar.clear()
    except KeyboardInterrupt:
        print(f"interrupted after {found}", file=sys.stderr)
        raise
    left = sorted(name for name, state in _files().items() if before.get(name) != state)
    if given.json:
        print_json(
            {
                "schedules": found.schedules,
                "seconds": found.seconds,
                "results_checked": found.results_checked,
                "wrong": found.wrong,
                "world_size": found.world_size,
                "seed": found.seed,
                "faults": [str(fault) for fault in found.faults],
                "script": found.script,
                "strays": [asdict(one) for one in found.strays],
                "printed": found.printed,
                "files": left,
            }
        )
        return 0 if found.wrong is None else 1
    _tell(found, left)
    return 0 if found.wrong is None else 1


def _files() -> dict[str, tuple[int, int]]:
    """Return the files in the working directory and one level below it, with time and size of each.

    Without those of interpreters, tests and version control, and those to which this command's output goes.
    """
    ours, found = [], {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            ours.append(os.fstat(number))
    here = _entries(".")
    for entry in chain(here, *(_entries(one) for one in here if one.is_dir())):
        with contextlib.suppress(OSError):  # it is gone
            seen = entry.stat()
            if entry.is_file() and not any(os.path.samestat(seen, one) for one in ours):
                found[os.path.relpath(entry.path)] = (seen.st_mtime_ns, seen.st_size)
    return found


def _entries(of: str | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return at most ``_MOST_ENTRIES`` entries: a directory with more holds data."""
    try:
        with os.scandir(of) as entries:
            return [one for one in islice(entries, _MOST_ENTRIES) if not one.name.startswith((".", "__"))]
    except OSError:
        return []


def _told_of_files(left: Sequence[str]) -> str:
    if not left:
        return ""
    more = f", and {len(left) - _MOST_FILES} more" if len(left) > _MOST_FILES else ""
    return (
        f"Files were written meanwhile: {', '.join(left[:_MOST_FILES])}{more}. Files are not simulated: "
        "every schedule finds what those before it have left, such as a checkpoint to resume from, and so "
        "does the next exploration. Remove them, and have the function write nothing, or to a new directory "
        "each time"
    )


def _tell(found: Exploration, left: Sequence[str]) -> None:
    from asynccoll.testing.strays import told

    wrong = found.wrong or ""
    parts = [wrong, told(found.strays, wrong), _told_of_files(left)]
    print(found.verdict)
    for part in filter(None, parts):
        print()
        show(part)
    if found.printed:
        print(f"\n# What its ranks printed:\n\n{found.printed.rstrip()}")
    if found.script:
        print(f"\n# Shows it again:\n\n{found.script}", end="")


def _explored(given: argparse.Namespace, progress: Callable[[Exploration], None]) -> Exploration:
    from asynccoll.testing.drawn import drawn_faults
    from asynccoll.testing.exploration import explore_target
    from asynccoll.testing.processes import exchanged
    from asynccoll.testing.targets import of_path

    kinds = tuple(kind for kind in given.faults.split(",") if kind)
    # A script that reads its arguments gets none, not those of this command; also in the processes of --jobs.
    with exchanged(sys, ("argv",), SimpleNamespace(argv=[given.target.partition("::")[0]])):
        return explore_target(
            of_path(given.target),
            seeds=range(given.first, given.first + given.seeds),
            jobs=given.jobs,
            faults=drawn_faults(*kinds) if kinds else (),
            expect=of_path(given.expect).function if given.expect else None,
            shrink_seconds=given.shrink,
            quiet=not given.show_prints,
            progress=progress,
            world_size=given.world_size,
            loop=given.loop,
            transport=given.transport,
            statements=tuple(given.statements),
            joined=not given.not_joined,
            lines=given.lines,
        )

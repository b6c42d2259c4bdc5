"""``asynccoll where``: what each rank of a running or hung job called last, and where it stands now."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from asynccoll.cli.calls import call_cells, call_columns, nobody, print_partings
from asynccoll.cli.common import Commands, at_least
from asynccoll.cli.output import Table, add_json, print_json, show
from asynccoll.host.words import listed

if TYPE_CHECKING:
    from asynccoll.jobs.whereabouts import Job

#: How many characters of a program and its arguments are shown.
_LONGEST = 80


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "where",
        help="ask a running or hung job from outside where each rank is",
        example="asynccoll where --calls 5",
        description="Ranks of this host are read from their flight recorders, so it also shows those that "
        "are stopped or stuck in native code; those of other hosts are asked. Stacks are shown for ranks "
        "that answer. The exit code is 1 if there is no rank.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        help="a process (a rank, or its launcher), host:port where the ranks met, or the job's directory; "
        "if left out, the only job of this host, or a line for each",
    )
    parser.add_argument(
        "-n", "--calls", type=at_least(0), default=3, metavar="N", help="how many last calls, default 3"
    )
    add_json(parser)
    parser.set_defaults(carry_out=_where)


def _where(given: argparse.Namespace) -> int:
    from asynccoll.jobs.whereabouts import find_jobs

    jobs = find_jobs(given.job)
    if given.json:
        print_json([job.to_dict(given.calls) for job in jobs])
    elif not jobs:
        show(nobody(given.job))
    else:
        show(*overview(jobs))
        if given.job is None and len(jobs) > 1:  # the user has not said which
            show("\nname one to see its calls and stacks: where its ranks met, or one of its processes")
            return 0
        for job in jobs:
            print()
            _print(job, given.calls, title=_title(job) if len(jobs) > 1 else "")
    return 0 if jobs else 1


def overview(jobs: Sequence[Job]) -> list[str]:
    """Return what comes first: a line for each job, and another for the ranks that it waits for."""
    return [line for job in jobs for line in (_title(job), f"  {job.hang}" if job.hang else "") if line]


def _title(job: Job) -> str:
    alone = f", pid {job.ranks[0].peer.pid}" if job.ranks else ""
    met = f", met at {job.meets}" if job.meets else alone
    program = " ".join(job.command.split())[:_LONGEST]
    return f"{len(job.ranks)} of {job.world_size} ranks{' of ' * bool(program)}{program}{met}"


def _print(job: Job, calls: int, title: str) -> None:
    columns = ("rank", "host", "pid", "process", *call_columns)
    spare = ["host"] * (len({one.peer.host for one in job.ranks}) == 1)
    spare += ["process"] * all(one.state == "running" for one in job.ranks)
    table = Table(columns, title=title, left=frozenset(columns) - {"rank", "pid", "called"}, spare=(*spare,))
    for one in job.ranks:
        who = (str(one.rank), one.peer.host, str(one.peer.pid), one.state)
        made = [call_cells(call, one.account.now) for call in one.last(calls)]
        none = "no call" if one.account.flight and not one.account.flight.calls else "-"
        for call in made or [(none, *["-"] * (len(call_columns) - 1))]:
            table.rows.append((*who, *call))
            who = ("", "", "", "")
    show(table)
    for (of, frames), ranks in same_stacks(job).items():
        print()
        show(f"{listed(ranks)}{', ' * bool(of)}{of} {'stand' if len(ranks) > 1 else 'stands'} in")
        print("\n".join(f"  {frame}" for frame in folded(frames)))
    print()
    print_partings(job.partings, job.recorded)


def folded(frames: Sequence[str]) -> list[str]:
    """Fold a stack, innermost first: a run of event-loop frames is one line, except what the program called.

    >>> folded(["a (trio/_core.py:1)", "b (trio/_core.py:2)", "sleep (trio/_timeouts.py:3)", "main (x.py:4)"])
    ['[... 2 frames in trio]', 'sleep (trio/_timeouts.py:3)', 'main (x.py:4)']
    """
    from asynccoll.host.frames import are_shown
    from asynccoll.host.libraries import library_in, line_for

    if are_shown() or all(map(library_in, frames)):
        return list(frames)
    told: list[str] = []
    for is_loops, found in groupby(frames, key=lambda frame: bool(library_in(frame))):
        run = list(found)
        called = [] if told else run[-1:]  # called by the program's frame, which follows
        hidden = run[: len(run) - len(called)]
        if is_loops and len(hidden) > 1:
            run = [line_for(map(library_in, hidden)), *called]
        told += run
    return told


def same_stacks(job: Job) -> dict[tuple[str, tuple[str, ...]], list[int]]:
    """Return the ranks with equal stacks, by thread or task and frames: hundreds may stand in one line."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for one in job.ranks:
        for of, frames in one.account.stacks.items():
            found.setdefault((of, tuple(frames)), []).append(one.rank)
    return found

"""``asynccoll top``: what the ranks of this host are doing, refreshed until stopped; or once, in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from asynccoll.cli.calls import nobody
from asynccoll.cli.common import Commands, at_least
from asynccoll.cli.output import Screen, Table, add_json, print_json, show
from asynccoll.host.call_number import call_name
from asynccoll.host.words import duration, size

if TYPE_CHECKING:
    from asynccoll.flight import Hang
    from asynccoll.jobs.live import RankNow

#: A job that has waited for some of its ranks for longer than this stands out.
_LONG_SECONDS = 5.0
_LONGEST_SECONDS = 86_400
#: When a terminal first shows something.
_FIRST_SECONDS = 0.2


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "top",
        help="watch the ranks of this host: what each has in flight, how fast it is, who is behind",
        example="asynccoll top --interval 0.5",
        description="Reads the ranks' flight recorders without asking the ranks, so it also shows those "
        "that hang. Runs until Ctrl-C on a terminal, once in a pipe.",
    )
    parser.add_argument("pid", nargs="?", type=int, help="only the ranks below this process: a launcher")
    parser.add_argument("-i", "--interval", type=float, default=1.0, metavar="SECONDS", help="default 1")
    parser.add_argument(
        "-n", "--count", type=at_least(1), metavar="N", help="how often; on a terminal without end, else 1"
    )
    add_json(parser, "a JSON document each time, on one line")
    parser.set_defaults(carry_out=_top)


def _top(given: argparse.Namespace) -> int:
    from asynccoll.errors import InvalidArgumentError
    from asynccoll.jobs.live import check_running

    if given.pid is not None:
        check_running(given.pid)
    if not 0 < given.interval <= _LONGEST_SECONDS:
        raise InvalidArgumentError(
            f"--interval {given.interval} is not possible; it must be above 0 seconds and at most a day"
        )
    live = sys.stdout.isatty() and not given.json
    try:
        return _watch(given, live)
    except KeyboardInterrupt:
        if given.count is not None or not live:
            raise
        return 0  # the intended way to end it


def _watch(given: argparse.Namespace, live: bool) -> int:
    """Look and show ``--count`` times; if that is not given, without end if live, else once."""
    count = given.count if given.count is not None else (0 if live else 1)
    with Screen() if live else contextlib.nullcontext() as screen:
        return _look_again(given, count, show if screen is None else screen.show, live=live)


def _look_again(given: argparse.Namespace, count: int, shown: Callable[..., None], *, live: bool) -> int:
    from asynccoll.jobs.live import hangs, is_running, snapshot, survey

    before, turn = snapshot(given.pid), 0
    while True:
        time.sleep(min(given.interval, _FIRST_SECONDS) if live and not turn else given.interval)
        now = snapshot(given.pid)
        ranks = survey(now, before)
        before, turn = now, turn + 1
        if given.json:
            print_json([rank.to_dict() for rank in ranks], in_a_line=True)
        else:
            shown(*_parts(ranks, hangs(now), given.pid))
        if turn == count:
            return 0 if ranks else 1
        if given.pid is not None and not is_running(given.pid):
            print(f"process {given.pid} has ended", file=sys.stderr)
            return 0


def _parts(ranks: list[RankNow], hangs: Mapping[int, Hang], of: int | None) -> Iterator[Table | str]:
    """Yield what is shown: first what stands out, since there may be more ranks than lines."""
    yield from remarks(ranks, hangs)
    yield _table(ranks) if ranks else nobody(None if of is None else str(of))


_LEFT = frozenset({"state", "operation", "lane", "line"})
_COLUMNS = (
    "job",
    "rank",
    "pid",
    "state",
    "calls/s",
    "bytes/s",
    "in flight",
    "behind",
    "operation",
    "lane",
    "line",
)


def _table(ranks: list[RankNow]) -> Table:
    one_job = len({one.job for one in ranks}) == 1
    table = Table(_COLUMNS, left=_LEFT, spare=("bytes/s", *["job"] * one_job, "calls/s", "lane"))
    for one in ranks:
        call = call_name(one.operation, one.sequence) or "-"
        since = duration(one.seconds if one.in_flight else one.idle)
        if one.behind or one.state != "running":
            table.bad.add(len(table.rows))
        table.rows.append(
            (
                str(one.job),
                f"{one.rank}/{one.world_size}",
                str(one.pid),
                one.state,
                f"{one.calls_per_second:.0f}",
                size(one.bytes_per_second),
                f"{one.in_flight} for {since}",
                str(one.behind) if one.behind else "-",
                call,
                one.lane or "-",
                one.place or "-",
            )
        )
    return table


def remarks(ranks: list[RankNow], hangs: Mapping[int, Hang]) -> list[str]:
    """Return what stands out, in words: which ranks a job has long waited for, and which do not run."""
    jobs = {one.job for one in ranks}
    said = [
        f"job {job}: {hang}" if len(jobs) > 1 else str(hang)
        for job, hang in hangs.items() if job in jobs and hang.seconds > _LONG_SECONDS
    ]  # fmt: skip
    stand = [one for one in ranks if one.state != "running"]
    return said + [f"rank {one.rank} (pid {one.pid}) is {one.state}" for one in stand]

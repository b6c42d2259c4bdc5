"""``asynccoll trace``: record a program on all its ranks, and show what they did when."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asynccoll.cli import run
from asynccoll.cli.calls import print_partings
from asynccoll.cli.common import Commands, at_least
from asynccoll.cli.output import Table, add_json, check_writable, print_json, show, standard_output_for_json
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.call_number import numbered
from asynccoll.host.words import duration, listed, plural, size

if TYPE_CHECKING:
    from asynccoll.trace import Trace
    from asynccoll.trace.findings import Findings
    from asynccoll.trace.stragglers import Straggling

_T = TypeVar("_T")

#: What the names of recordings end in while ranks record in their place.
_EARLIER = ".earlier"
_RUN_TEXT = """\
Start the ranks of a program as `asynccoll run` does, record all of them, and write trace.html (to open in a
browser) and trace.json (for ui.perfetto.dev).

  asynccoll trace run -n 2 train.py --epochs 1
  asynccoll trace run -o traces -n 2 train.py
"""
_RUN_NOTES = """\
The program calls ac.initialize(); it needs no changes. Calls of modules, backward passes and optimizer steps
are marked automatically. A job that hangs is shown as far as it got: stop it with Ctrl-C. Under another
launcher, start the program with ASYNCCOLL_TRACE=DIR, and view it with `asynccoll trace merge DIR`.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="record a program on all its ranks, and show what they did when",
        example="asynccoll trace run -n 2 train.py",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    for kind in KINDS:
        kind(kinds)


def _add_run(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "run",
        help="start a program and record it",
        example="asynccoll trace run -n 2 -o trace train.py",
        usage="asynccoll trace run [-o DIR] [--json] [options of asynccoll run] script.py [args ...]",
        description=_RUN_TEXT,
        epilog=_RUN_NOTES,
        formatter_class=run.HelpFormatter,
        allow_abbrev=False,
    )
    _add_output(parser)
    run.add_options(parser)
    parser.set_defaults(carry_out=_run)


def _add_merge(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "merge", help="show what ranks have recorded in a directory", example="asynccoll trace merge trace"
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the directory that ASYNCCOLL_TRACE or -o named"
    )
    _add_output(parser)
    parser.set_defaults(carry_out=_merge)


def _add_diff(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "diff",
        help="where the ranks' calls diverge, by what they had recorded at a failure",
        example="asynccoll trace diff /tmp/asynccoll-0/6f0ae5c67fed",
        description="Aligns the last calls of all ranks, lane by lane. The ranks need not run any more. "
        "The exit code is 1 if they diverge.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the directory of dumps that an error names"
    )
    add_json(parser)
    parser.set_defaults(carry_out=_diff)


def _add_stragglers(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "stragglers",
        help="who called each operation last, and how long the others waited",
        example="asynccoll trace stragglers trace",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="what ASYNCCOLL_TRACE or `trace run -o` named, or dumps"
    )
    parser.add_argument(
        "-n", "--most", type=at_least(1), default=20, metavar="N", help="how many lines, default 20"
    )
    add_json(parser)
    parser.set_defaults(carry_out=_stragglers)


#: The subcommands of ``asynccoll trace``, in the order of its help.
KINDS = (_add_run, _add_merge, _add_diff, _add_stragglers)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="where to write, default here")
    add_json(parser)


def _run(given: argparse.Namespace) -> int:
    from asynccoll.launch.engines import run as start
    from asynccoll.trace.spooling import VARIABLE, recordings

    if (wrong := run.missing_program(given)) is not None:
        return wrong
    with _recording_in(given.output) as directory:
        os.environ[VARIABLE] = str(directory)
        try:
            with standard_output_for_json() if given.json else nullcontext():
                code = start(run.request(given))
        finally:
            del os.environ[VARIABLE]
        if not recordings(directory):
            print("asynccoll trace: nothing was recorded: did a rank call ac.initialize()?", file=sys.stderr)
            return code or 1
        _show(directory, given)
    return code


@contextmanager
def _recording_in(output: Path | None) -> Iterator[Path]:
    """Yield where ranks record: ``output``, kept for ``merge`` and ``stragglers``, else a temporary place."""
    from asynccoll.launch import passing

    if output is None:
        check_writable(Path())
        with passing.temporary("asynccoll-trace-") as temporary:
            yield temporary
        return
    check_writable(output)
    with _replacing(output):
        yield output.resolve()


@contextmanager
def _replacing(output: Path) -> Iterator[None]:
    """Set earlier recordings in ``output`` aside; after the block delete them if there are new ones.

    Otherwise they are put back: the launcher may have refused its options, or the program may have failed
    before its ranks met.
    """
    from asynccoll.launch import passing
    from asynccoll.trace.spooling import later_worlds, recordings

    _settle(output)  # a run that was killed could not
    with passing.undoing(partial(_settle, output)):
        for directory in (output, *later_worlds(output)):
            for one in recordings(directory):
                one.rename(one.with_suffix(_EARLIER))
        yield


def _settle(output: Path) -> None:
    """Delete the recordings that were set aside, or put them back if none have replaced them."""
    from asynccoll.trace.spooling import later_worlds, recordings

    replaced = recordings(output)
    for directory in (output, *later_worlds(output)):
        for moved in directory.glob(f"rank-*{_EARLIER}"):
            if replaced:
                moved.unlink()
            else:
                moved.rename(moved.with_suffix(".jsonl"))


def _written_to(directory: Path) -> tuple[Path, Path]:
    """Return the paths of the page and the Perfetto file: they replace earlier ones, but only of ours.

    The user did not choose these names, and other tools write a ``trace.json``, too.
    """
    from asynccoll.trace.page import is_page
    from asynccoll.trace.perfetto import are_events

    return _ours(directory / "trace.html", is_page), _ours(directory / "trace.json", are_events)


def _ours(path: Path, is_ours: Callable[[Path], bool]) -> Path:
    return path if not path.exists() or is_ours(path) else path.with_name(f"asynccoll-{path.name}")


def _merge(given: argparse.Namespace) -> int:
    _show(given.directory, given)
    return 0


def _diff(given: argparse.Namespace) -> int:
    from asynccoll.flight import hang_of, partings, unmet
    from asynccoll.flight.dumps import read_dumps

    _check_no_recording(given.directory)
    flights, now = read_dumps(given.directory)
    found, hang = partings(flights), hang_of(flights, now)
    if given.json:
        messages = [one.to_dict() for one in unmet(flights)]
        said = {"ranks": list(flights), "partings": [one.to_dict() for one in found], "messages": messages}
        print_json({**said, "hang": asdict(hang) if hang else None})
        return 1 if found or messages else 0
    if hang:
        show(f"{hang}\n")
    return 1 if print_partings(found, flights) else 0


def _check_no_recording(directory: Path) -> None:
    from asynccoll.trace.spooling import recordings

    if recordings(directory) and not any(directory.glob("rank-*.json")):
        raise InvalidArgumentError(
            f"{str(directory)!r} has a recording, but no dumps of a failure: `asynccoll trace merge` shows "
            "what was in flight at its end, and who had not called it; `asynccoll trace stragglers`, who "
            "was late"
        )


def _stragglers(given: argparse.Namespace) -> int:
    from asynccoll.trace.stragglers import by_line, load_stragglers

    found = load_stragglers(given.directory)
    lines = by_line(found.arrivals)[: given.most]
    if given.json:
        print_json([asdict(one) for one in lines])
        return 0
    if found.verdict:
        show(f"{found.verdict}\n")
    show(_stragglers_table(lines, len(found.arrivals), found.left_out))
    return 0


def _stragglers_table(lines: Sequence[Straggling], operations: int, left_out: int) -> Table:
    columns = ("operation", "lane", "calls", "last", "of them", "others waited", "median", "longest", "line")
    without = ", without the first step" * left_out
    title = f"who was last, of {operations} operations that all their ranks called{without}"
    rows: list[Sequence[str]] = [
        (
            *(one.operation, one.lane, str(one.calls), f"rank {one.rank}", str(one.last)),
            *map(duration, (one.total, one.median, one.longest)),
            one.place,
        )
        for one in lines
    ]
    left = frozenset({"operation", "lane", "line"})
    return Table(columns, rows, title=title, left=left, spare=("median", "lane"))


def _show(directory: Path, given: argparse.Namespace) -> None:
    from asynccoll.trace import load

    trace = load(directory)
    to = given.output or Path()
    check_writable(to)
    page, events = _written_to(to)
    replaced = [str(path) for path in (page, events) if path.exists()]
    written = [trace.to_html(page), trace.to_perfetto(events)]
    if given.json:
        print_json({**trace.to_dict(), "files": [str(path) for path in written]})
        return
    _print(trace)
    print()
    show(f"{written[0]}: open it in a browser; {written[1]}: for ui.perfetto.dev")
    if replaced:
        show(
            f"replaced from an earlier trace: {', '.join(replaced)}; with -o DIR each gets its own directory"
        )
    _tell_later(directory, kept=directory == to.resolve() or given.kind == "merge")


def _tell_later(directory: Path, *, kept: bool) -> None:
    """Say that the program joined more worlds than the one that is shown, and how to see them."""
    from asynccoll.trace.spooling import later_worlds, recordings

    later = [one for one in later_worlds(directory) if recordings(one)]
    if later:
        others = "the next" if len(later) == 1 else f"the next, up to {later[-1].name}"
        how = (
            f"asynccoll trace merge {later[0]}" if kept else "run it with -o DIR, which keeps the recordings"
        )
        show(f"this is the first world that the program joined; for {others}: {how}")


def _print(trace: Trace) -> None:
    from asynccoll.trace.advice import advice, breaks_off, summary

    found = trace.findings
    whole = (
        f"{plural(found.ranks, 'rank')}, {duration(found.seconds)}, {plural(found.operations, 'operation')}"
    )
    show(f"{whole}: {summary(found)}")
    for said in filter(None, (advice(found), breaks_off(found))):
        show(said)
    for table in tables(found):
        if table.rows:
            print()
            show(table)


def tables(found: Findings) -> list[Table]:
    """Return tables of what hangs, the slowest ranks, the longest waits, and the steps."""
    return [_unfinished(found), _lateness(found), _waits(found), _steps(found)]


def _first(most: int, what: Sequence[_T], title: str) -> tuple[Sequence[_T], str]:
    """Return the first ones, at most that many, and the title of a table that has only these."""
    return what[:most], f"{title} (the first {most} of {len(what)})" if len(what) > most else title


def _unfinished(found: Findings) -> Table:
    columns = ("rank", "operation", "lane", "call", "for", "not called by", "line")
    shown, title = _first(10, found.unfinished, "unfinished at the end, or failed")
    rows: list[Sequence[str]] = [
        (
            *(str(one.rank), one.operation, one.lane, numbered(one.sequence), duration(one.seconds)),
            *(listed(one.missing) if one.missing else "-", one.place),
        )
        for one in shown
    ]
    return Table(columns, rows, title, frozenset({"operation", "lane", "not called by", "line"}))


def _lateness(found: Findings) -> Table:
    from asynccoll.trace.advice import longer

    columns = ("rank", "last in", "others waited", "longest", "for", "takes longer", "line")
    shown, title = _first(10, found.lateness if found.ranks > 1 else (), "who was late")
    rows: list[Sequence[str]] = [
        (
            *(str(one.rank), f"{one.last} of {one.of}", duration(one.total), duration(one.longest)),
            *(one.longest_operation, longer(one.doing), one.longest_place),
        )
        for one in shown
    ]
    return Table(columns, rows, title, frozenset({"for", "takes longer", "line"}))


def _waits(found: Findings) -> Table:
    columns = ("operation", "lane", "calls", "size", "waited for", "longest", "on rank", "line")
    shown, title = _first(10, found.waits, "longest waits, all ranks")
    rows: list[Sequence[str]] = [
        (
            *(one.operation, one.lane, str(one.calls), size(one.size_bytes), duration(one.total)),
            *(duration(one.longest), str(one.longest_rank), one.place),
        )
        for one in shown
    ]
    return Table(columns, rows, title, frozenset({"operation", "lane", "line"}))


def _steps(found: Findings) -> Table:
    shown, title = _first(20, found.steps, "steps, means over ranks")
    rows: list[Sequence[str]] = [
        (
            str(one.number),
            *map(duration, (one.end - one.start, one.in_flight, one.waited)),
            "-" if one.hidden is None else f"{one.hidden:.0%}",
        )
        for one in shown
    ]
    return Table(("step", "took", "in flight", "waited for", "hidden"), rows, title)

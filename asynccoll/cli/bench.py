"""``asynccoll bench``: our collectives next to those of peers, measured and printed as in nccl-tests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynccoll.cli.common import Commands, at_least
from asynccoll.cli.output import Bar, Table, add_json, check_writable, print_json, show
from asynccoll.host.words import plural, size

if TYPE_CHECKING:
    from asynccoll.bench.request import BenchRequest

_TEXT = """\
Compare collectives with those of torch, functional collectives, ignite, Horovod and mpi4py, in one run.

  asynccoll bench                                       all_reduce from 4 B to 8 MiB, on two ranks
  asynccoll bench all_gather broadcast -b 1K -e 1M -f 4 --ranks 4
  asynccoll bench all --json > bench.json
  mpiexec -n 4 asynccoll bench --backend mpi            in ranks that a launcher has started
"""
_NOTES = """\
Columns are those of nccl-tests: size of the whole and count of one rank's part; time, size over time (algbw),
bus bandwidth (busbw), and wrong elements. Out-of-place results get fresh memory, in-place ones overwrite
existing memory. Every round runs every peer once, in changing order; times are medians over rounds of the
mean over ranks, and "x torch" is the median over rounds of the time divided by that of torch.distributed in
the same round.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="compare collectives with other libraries",
        example="asynccoll bench all_reduce -n 2",
        description=_TEXT,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "operations", nargs="*", metavar="OPERATION",
        help="all_reduce (the default), all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, "
        "scatter, sendrecv; or all",
    )  # fmt: skip
    parser.add_argument("-b", "--minbytes", default="4", metavar="SIZE", help="smallest size, default 4")
    parser.add_argument("-e", "--maxbytes", default="16M", metavar="SIZE", help="largest size, default 16M")
    parser.add_argument(
        "-f", "--stepfactor", type=int, default=8, metavar="N", help="factor from size to size, default 8"
    )
    parser.add_argument("--sizes", metavar="SIZE,...", help="these sizes instead, such as 4,4K,64K,1M,16M")
    parser.add_argument(
        "-n", "--iters", type=at_least(0), default=0, metavar="N",
        help="calls of each peer in each round, default 30, above 64 KiB 8, above 1 MiB 2",
    )  # fmt: skip
    parser.add_argument("-w", "--warmup-iters", type=at_least(0), default=2, metavar="N", help="default 2")
    parser.add_argument("-d", "--datatype", default="float", metavar="NAME", help="default float")
    parser.add_argument(
        "-o", "--op", default="sum", metavar="NAME", help="sum, prod, min, max, avg; default sum"
    )
    parser.add_argument("--rounds", type=at_least(1), default=15, metavar="N", help="default 15")
    parser.add_argument("--ranks", type=at_least(1), default=2, metavar="N", help="on this host, default 2")
    parser.add_argument("--backend", metavar="NAME", help="default nccl with a GPU for each rank, else gloo")
    parser.add_argument(
        "--peers", metavar="NAME,...",
        help="only these: asynccoll, torch, functional, ignite, horovod, mpi4py",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot time and bandwidth to a .svg, .png or .pdf file"
    )
    parser.set_defaults(carry_out=_bench)


def _bench(given: argparse.Namespace) -> int:
    from asynccoll.bench.starting import bench

    if given.plot is not None:
        from asynccoll.bench.picture import check_drawable

        check_writable(given.plot.parent)
        check_drawable(given.plot)
    shown = _Shown(as_json=given.json)
    code = bench(_request(given), shown.report, ranks=given.ranks)
    if code:
        shown.break_off()
    elif shown.header:
        shown.end()
    if given.plot is not None and (code or shown.header):
        _draw(shown, given.plot)
    return code or shown.code


def _draw(shown: _Shown, path: Path) -> None:
    from asynccoll.bench.picture import draw

    if shown.rows:
        draw(shown.header, shown.rows, path, shown.missing)
    what = "drawn" if shown.rows else "nothing was measured, so nothing is drawn"
    print(f"{what}: {path}{f' ({shown.missing})' * bool(shown.missing)}", file=sys.stderr)


def _request(given: argparse.Namespace) -> BenchRequest:
    from asynccoll.backends.table import usable, usual_backend
    from asynccoll.bench.operations import (
        DTYPES,
        OPERATIONS,
        REDUCTIONS,
        check_known,
        parse_size,
        sizes_between,
    )
    from asynccoll.bench.peers import ALL
    from asynccoll.bench.request import BenchRequest
    from asynccoll.environment.detection import detect_here

    asked = given.operations or ["all_reduce"]
    operations = tuple(OPERATIONS) if "all" in asked else tuple(dict.fromkeys(asked))
    if given.sizes:
        sizes = tuple(map(parse_size, given.sizes.split(",")))
    else:
        sizes = tuple(sizes_between(parse_size(given.minbytes), parse_size(given.maxbytes), given.stepfactor))
    peers = tuple(name for name in (given.peers or "").split(",") if name)
    check_known("operation", operations, OPERATIONS)
    check_known("type", (given.datatype,), DTYPES)
    check_known("reduction", (given.op,), REDUCTIONS)
    check_known("peer", peers, [library.name for library in ALL])
    launch = detect_here()
    # not the launcher's default: that of mpiexec, which mpi4py needs, would be mpi
    backend = usable(
        given.backend or usual_backend(launch.sharing_gpus if launch.world_size > 1 else given.ranks)
    )
    return BenchRequest(
        operations=operations,
        sizes=sizes,
        dtype=given.datatype,
        reduction=given.op,
        iterations=given.iters,
        warmup=given.warmup_iters,
        rounds=given.rounds,
        peers=peers,
        backend=backend,
    )


class _Shown:
    """The output of a run: a progress bar, and a table for each operation or, at the end, all as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self.header: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self._as_json = as_json
        self._done = 0
        self._bar = Bar(1)

    @property
    def code(self) -> int:
        """1 if a result was wrong, else 0."""
        return int(any(row["wrong"] for row in self.rows))

    def report(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "start":
            self.header, self._bar = what, Bar(what["steps"])
            if not self._as_json:
                for line in _heading(what):
                    show(line)
        elif kind == "step":
            self._done += 1
            self._bar.show(self._done, self._where())
        elif kind == "row":
            if self.rows and self.rows[-1]["operation"] != what["operation"]:
                self._print(self.rows[-1]["operation"])
            self.rows.append(what)

    @property
    def missing(self) -> str:
        """The note that not all was measured; "" if it was."""
        is_all = not self.header or self._done >= self.header["steps"]
        return "" if is_all else f"not everything was measured: {self._where()}"

    def _where(self) -> str:
        return f"{self._done} of {self.header['steps']} rounds"

    def _print(self, operation: str) -> None:
        self._bar.clear()
        if not self._as_json:
            show(_table(operation, [row for row in self.rows if row["operation"] == operation]))

    def break_off(self) -> None:
        """Print what has been measured; as JSON nothing, since it would pass for the whole run."""
        self._bar.clear()
        if self.rows and not self._as_json:
            self._print(self.rows[-1]["operation"])
            if self.missing:
                show(f"# {self.missing}")

    def end(self) -> None:
        self._bar.clear()
        if self._as_json:
            print_json({**self.header, "rows": self.rows})
            return
        if self.rows:
            self._print(self.rows[-1]["operation"])
        for line in _errors(self.rows):
            show(line)


def _heading(header: dict[str, Any]) -> Iterator[str]:
    place = f"{plural(header['ranks'], 'rank')} on {plural(header['nodes'], 'host')}"
    how = f"{header['backend']}{', ours through memory' * header['memory']}"
    where = f"{plural(header['cores'], 'core')}, {header['device']}"
    yield (
        f"# asynccoll {header['asynccoll']}, torch {header['torch']}, {how}, {place}, "
        f"{where}; medians of {plural(header['rounds'], 'round')}"
    )
    for name, why in header["absent"].items():
        yield f"# without {name}: {why}"


_PLACE = {"out-of-place": "out", "in-place": "in"}
_WORDS = frozenset({"type", "redop", "peer", "place"})


def _table(operation: str, rows: list[dict[str, object]]) -> Table:
    """Return a table with a line for each size, peer and place."""
    columns = ("size", "count", "type", "redop", "root", "peer", "place")
    figures = ("time us", "algbw", "busbw", "wrong", "x torch")
    title = f"{operation} (bandwidths in GB/s)"
    table = Table((*columns, *figures), title=title, left=_WORDS, spare=("root", "redop", "type"))
    for row in rows:
        table.rows.append(_line(row))
        if row["error"] or row["wrong"]:
            table.bad.add(len(table.rows) - 1)
        elif row["peer"] == "asynccoll":
            table.good.add(len(table.rows) - 1)
    return table


def _line(row: dict[str, Any]) -> list[str]:
    ratio = row["over_torch"]
    line = [
        size(row["size_bytes"]),
        str(row["count"]),
        row["dtype"],
        row["reduction"],
        str(row["root"]),
        row["peer"],
        _PLACE[row["way"]],
    ]
    if row["error"]:
        return [*line, "-", "-", "-", "-", "-"]
    return [
        *line,
        f"{row['median_us']:.1f}",
        f"{row['algbw_gbs']:.3f}",
        f"{row['busbw_gbs']:.3f}",
        str(row["wrong"]),
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _errors(rows: list[dict[str, object]]) -> list[str]:
    """Return what peers could not do, once each."""
    told = {(row["peer"], row["operation"], row["error"]): None for row in rows if row["error"]}
    return [f"# {peer} cannot {operation}: {error}" for peer, operation, error in told]

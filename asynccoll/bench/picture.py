"""Rows of a run as a plot: time and bandwidth over size, a line for each peer and way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asynccoll.errors import InvalidArgumentError
from asynccoll.host import words
from asynccoll.trace.plot import STYLE, figure_type

#: Okabe and Ito's palette, as in timelines, which color-blind readers can tell apart.
COLOURS = {
    "asynccoll": "#0072B2",
    "torch": "#D55E00",
    "functional": "#E69F00",
    "ignite": "#CC79A7",
    "horovod": "#009E73",
    "mpi4py": "#222222",
}
_NEEDS = ("asynccoll bench --plot", "--json needs nothing")


def check_drawable(path: Path) -> None:
    """Check that ``path`` can be drawn, before anything is measured.

    Raises:
        BackendNotFoundError: matplotlib is missing; the text has the line that installs it.
        InvalidArgumentError: matplotlib cannot write such a file.
    """
    kinds = figure_type(*_NEEDS)().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise InvalidArgumentError(f"{str(path)!r} has to end in one of .{', .'.join(sorted(kinds))}")


def draw(header: dict[str, Any], rows: Sequence[dict[str, object]], path: Path, note: str = "") -> Path:
    """Draw what a run found into ``path``, below a ``note``; the same rows give the same file.

    Raises:
        BackendNotFoundError: matplotlib is missing; the text has the line that installs it.
    """
    made = figure_type(*_NEEDS)
    import matplotlib as mpl

    with mpl.rc_context({**STYLE, "svg.hashsalt": "asynccoll", "svg.fonttype": "none"}):
        figure = _drawn(made, header, rows)
        if note:
            figure.suptitle(note)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    return path


def _drawn(made: Any, header: dict[str, Any], rows: Sequence[dict[str, object]]) -> Any:
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    figure = made(figsize=(10.5, 4.4 * max(1, len(operations))), layout="constrained")
    pairs = figure.subplots(max(1, len(operations)), 2, squeeze=False)
    how = f"{header['backend']}{' (ours: memory)' if header['memory'] else ''}"
    where = f"{words.plural(header['ranks'], 'rank')} on {how}"
    for (left, right), operation in zip(pairs, operations, strict=False):
        _draw_lines(left, right, [row for row in rows if row["operation"] == operation and not row["error"]])
        left.set_title(f"{operation}, {where}: microseconds")
        right.set_title(f"{operation}, {where}: GB/s on the bus")
        if left.lines:  # none if no peer can do it
            left.legend()
    return figure


def _draw_lines(left: Any, right: Any, rows: Sequence[dict[str, Any]]) -> None:
    ways = dict.fromkeys((row["peer"], row["way"]) for row in rows)
    sizes = sorted({row["size_bytes"] for row in rows})
    for peer, way in ways:
        line = [row for row in rows if (row["peer"], row["way"]) == (peer, way)]
        at = [row["size_bytes"] for row in line]
        look: dict[str, object] = {"color": COLOURS.get(peer, "#56B4E9"), "marker": "o", "markersize": 4}
        look |= {"linestyle": "-" if way == "in-place" else "--", "label": f"{peer} {way}"}
        look |= {"linewidth": 2.0 if peer == "asynccoll" else 1.2}
        left.plot(at, [row["median_us"] for row in line], **look)
        right.plot(at, [row["busbw_gbs"] for row in line], **look)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size")
        axes.set_xticks(sizes, [words.size(size) for size in sizes], rotation=30, fontsize=8)

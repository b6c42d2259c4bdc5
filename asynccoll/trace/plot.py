"""Draw a timeline: rows of bars in matplotlib, compute above, communication below.

The colors are those of Okabe and Ito, which stay distinct for color-blind readers and in gray;
communication that is waited for is hatched as well. matplotlib loads when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynccoll.errors import BackendNotFoundError
from asynccoll.host import words
from asynccoll.trace.spans import Span, covered, intersection, stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Settings for ``matplotlib.rc_context``: a title on the left, a pale grid behind the data, no frame.
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "legend.fontsize": 8,
    "legend.frameon": False,
}


def figure_type(what: str, otherwise: str) -> Any:
    """Import matplotlib, and return its ``Figure``.

    Raises:
        BackendNotFoundError: it is not installed; the text says that ``what`` needs it, how to install it,
        and ``otherwise``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendNotFoundError(
            f"{what} needs matplotlib, which is not installed: pip install 'matplotlib>=3.8' ({otherwise})"
        ) from error
    return Figure


COMPUTE = ("#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#F0E442")
HIDDEN = "#E69F00"
WAITED = "#D55E00"
INK = "#222222"
MUTED = "#6b6b6b"
_PALE = {"#56B4E9", "#F0E442", HIDDEN}  # dark ink reads better on these
_LOOK: dict[Any, Any] = {"axes.grid.axis": "x", "axes.spines.left": False, "axes.titlesize": 12}
WIDTH_INCHES = 11.0
TRACK_INCHES = 0.26
#: The height of all tracks together; if there are many, they become thinner, and lose their labels.
MOST_INCHES = 16.0
LABELLED_INCHES = 0.15
#: The width of a letter at the size of the labels, to tell whether a label fits.
LETTER_INCHES = 0.075


def draw(path: Path, spans: Sequence[Span], seconds: float, title: str) -> Path:
    """Draw ``spans``, which are sorted by start, of a recording of ``seconds``, to the file ``path``."""
    made = figure_type("timeline.plot", "timeline.to_chrome needs nothing")
    import matplotlib as mpl

    rows = stack(spans)
    tracks = sum(len(stacked) for _, stacked in rows)
    track_inches = min(TRACK_INCHES, MOST_INCHES / max(1, tracks))
    height = 1.5 + track_inches * tracks + 0.12 * len(rows)
    figure: Figure = made(figsize=(WIDTH_INCHES, height), layout="constrained")
    with mpl.rc_context({**STYLE, **_LOOK}):
        picture = _Picture(spans, seconds, figure.add_subplot(), legible=track_inches >= LABELLED_INCHES)
        picture.add_rows(rows)
        picture.finish(title)
        figure.savefig(path, dpi=150)
    return path


def _lane(name: str, tracks: list[list[Span]]) -> str:
    """Return the label of a lane's row; with the operation, if it is always the same."""
    names = {span.name for track in tracks for span in track}
    return f"lane {name}\n{names.pop()}" if len(names) == 1 else f"lane {name}"


class _Picture:
    """An axes that is filled from top to bottom; times are in milliseconds from the first span."""

    def __init__(self, spans: Sequence[Span], seconds: float, axes: Axes, *, legible: bool) -> None:
        self.axes = axes
        self.legible = legible  # whether bars are high enough for a label, and for a line around them
        self.origin = min((span.start for span in spans), default=0.0)
        self.last = max((span.end or seconds for span in spans), default=1e-3)
        compute = [self._interval(span) for span in spans if not span.is_operation]
        self.compute = covered(compute)
        # in the order of their names, so that two recordings of a program have the same colors
        names = sorted({span.name for span in spans if not span.is_operation})
        self.colours = {name: COMPUTE[at % len(COMPUTE)] for at, name in enumerate(names)}
        self.y = 0.0
        self.ticks: list[tuple[float, str]] = []
        self.legend: dict[str, dict[str, Any]] = {}

    def _interval(self, span: Span) -> tuple[float, float]:
        end = self.last if span.end is None else span.end
        return 1e3 * (span.start - self.origin), 1e3 * (end - self.origin)

    def add_rows(self, rows: list[tuple[str, list[list[Span]]]]) -> None:
        before: bool | None = None
        for name, tracks in rows:
            operations = tracks[0][0].is_operation
            if before is not None:
                self.y += 0.45 if before != operations else 0.25
            if before is False and operations:
                self.axes.axhline(self.y - 0.225, color=MUTED, linewidth=0.8)
            before = operations
            self._add_row(_lane(name, tracks) if operations else name, tracks)

    def _add_row(self, label: str, tracks: list[list[Span]]) -> None:
        self.ticks.append((self.y + len(tracks) / 2, label))
        for track in tracks:
            for span in track:
                draw_span = self._add_operation if span.is_operation else self._add_compute
                draw_span(span)
            self.y += 1

    def _add_compute(self, span: Span) -> None:
        colour = self.colours[span.name]
        self._bar([self._interval(span)], facecolor=colour)
        self.legend.setdefault(span.name, {"facecolor": colour})
        self._label(span, span.name, INK if colour in _PALE else "white")

    def _add_operation(self, span: Span) -> None:
        start, end = self._interval(span)
        hidden = intersection([(start, end)], self.compute)
        waited = {"facecolor": WAITED, "hatch": "////", "edgecolor": "white"}
        self._bar([(start, end)], **waited)
        self._bar(hidden, facecolor=HIDDEN)
        self.legend.setdefault("communication hidden behind compute", {"facecolor": HIDDEN})
        self.legend.setdefault("communication waited for", waited)
        size = words.size(span.size_bytes) if span.size_bytes else ""
        self._label(span, f"{span.name} {size}".strip(), INK) or self._label(span, size, INK)

    def _bar(self, intervals: list[tuple[float, float]], **look: Any) -> None:
        look = {"edgecolor": "white", **look, "linewidth": 0.5 if self.legible else 0.0}
        widths = [(start, end - start) for start, end in intervals]
        self.axes.broken_barh(widths, (self.y + 0.06, 0.88), **look)

    def _label(self, span: Span, text: str, colour: str) -> bool:
        """Write ``text`` into the bar of ``span`` if it fits; return whether it did."""
        from matplotlib.patheffects import withStroke

        if not self.legible:
            return False
        start, end = self._interval(span)
        room = (end - start) / max(1e-9, 1e3 * (self.last - self.origin)) * (WIDTH_INCHES - 2)
        if room <= LETTER_INCHES * len(text):
            return False
        middle = (start + end) / 2
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
        shown = self.axes.text(middle, self.y + 0.5, text, color=colour, clip_on=True, **look)
        if span.is_operation:  # legible on the hatching
            shown.set_path_effects([withStroke(linewidth=2, foreground="white")])
        return True

    def finish(self, title: str) -> None:
        from matplotlib.patches import Patch

        axes = self.axes
        axes.set_title(title, color=INK)
        axes.set_xlabel("time in ms", color=INK)
        axes.set_xlim(0, max(1e-3, 1e3 * (self.last - self.origin)))
        axes.set_ylim(self.y + 0.1, -0.1)  # the first row on top
        axes.set_yticks([y for y, _ in self.ticks], [label for _, label in self.ticks])
        axes.tick_params(axis="y", length=0)
        handles = [Patch(label=label, **look) for label, look in self.legend.items()]
        if handles:
            figure = axes.get_figure()
            assert figure is not None
            figure.legend(
                handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize="medium"
            )

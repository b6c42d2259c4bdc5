"""Lazy loading of matplotlib, and the look of our pictures."""

from __future__ import annotations

from typing import Any

from asynccoll.errors import BackendNotFoundError

__all__ = ["STYLE", "figure_type"]

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

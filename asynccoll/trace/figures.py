"""Lazy loading of matplotlib."""

from __future__ import annotations

from typing import Any

from asynccoll.errors import BackendNotFoundError

__all__ = ["figure_type"]


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

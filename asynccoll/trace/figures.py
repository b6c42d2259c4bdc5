"""The one way to matplotlib."""

from __future__ import annotations

from typing import Any

from asynccoll.errors import BackendNotFoundError

__all__ = ["figure_type"]


def figure_type(what: str, otherwise: str) -> Any:
    """matplotlib's ``Figure``, which loads now.

    Raises:
        BackendNotFoundError: it is not installed; says that ``what`` needs it, how to get it, and
        ``otherwise``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendNotFoundError(
            f"{what} needs matplotlib, which is not installed: pip install 'matplotlib>=3.8' ({otherwise})"
        ) from error
    return Figure

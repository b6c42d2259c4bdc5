"""Sizes and counts as people read them, and the one way to matplotlib."""

from __future__ import annotations

from typing import Any

from asynccoll.errors import BackendNotFoundError

__all__ = ["figure_type", "plural", "size"]


def size(size_bytes: float) -> str:
    """``1.5 MiB``."""
    amount, units = float(size_bytes), ["B", "KiB", "MiB", "GiB"]
    while round(amount) >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if amount >= 10 or units[0] == "B" else f"{amount:.1f} {units[0]}"


def plural(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'s' * (count != 1)}"


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

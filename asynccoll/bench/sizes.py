"""Sizes as nccl-tests and people write them (``4K``, ``16M``), and the sizes that a run goes through."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asynccoll.errors import InvalidArgumentError

__all__ = ["parse", "ramp"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WRITTEN = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse(written: str) -> int:
    """Return the size in bytes: ``"4K"``, ``"4 KiB"`` and ``"4096"`` are 4096.

    Raises:
        InvalidArgumentError: it is not of that form, or 0.
    """
    found = _WRITTEN.fullmatch(written.strip())
    if found is None:
        raise InvalidArgumentError(
            f"size {written!r} cannot be read; expected a number of bytes such as 4K or 16M"
        )
    size = int(found[1]) * _UNITS[found[2].upper()]
    if not size:  # one element would be measured, and reported with its own size
        raise InvalidArgumentError(f"size {written!r} is not possible; expected at least 1 byte")
    return size


def ramp(first: int, last: int, factor: int) -> Iterator[int]:
    """Yield sizes from ``first`` to ``last`` bytes, each ``factor`` times the one before.

    Raises:
        InvalidArgumentError: there would be none, or the sizes would never end.
    """
    if first < 1 or last < first or factor < 2:
        raise InvalidArgumentError(
            f"sizes from {first} to {last} bytes by a factor of {factor} are not possible; expected at least "
            "1 byte, an end that is no smaller, and a factor of at least 2"
        )
    size = first
    while size <= last:
        yield size
        size *= factor

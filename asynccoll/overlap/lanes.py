"""The lanes that backward passes and steps issue on, from whichever thread runs them."""

from __future__ import annotations

from asynccoll.errors import InvalidArgumentError

__all__ = ["backward_lane"]

#: Lanes of this suffix are those of backward passes: whichever thread runs one may issue there. The
#: order on such a lane is kept by who sends on it, one operation after the other.
_SUFFIX = "/backward"


def backward_lane(lane: str) -> str:
    """The lane ``<lane>/backward``."""
    if not isinstance(lane, str) or not lane:
        raise InvalidArgumentError(f"lane must be a non-empty string, got {lane!r}")
    return lane + _SUFFIX

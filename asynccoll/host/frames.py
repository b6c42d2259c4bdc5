"""Leave our frames out of tracebacks of our errors, whose messages say what to do, and of Ctrl-C."""

from __future__ import annotations

import os
from traceback import walk_tb
from typing import TypeVar

from asynccoll.host.call_site import is_users

FULL_VARIABLE = "ASYNCCOLL_FULL_TRACEBACK"

Error = TypeVar("Error", bound=BaseException)


def are_shown() -> bool:
    """Whether the environment variable requests all frames."""
    return os.environ.get(FULL_VARIABLE, "0") not in ("", "0")


def without_ours(error: Error) -> Error:
    """Return ``error``, without its traceback unless that has a frame of the user's (such as a codec's)."""
    passed = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    return error if are_shown() or any(map(is_users, passed)) else error.with_traceback(None)

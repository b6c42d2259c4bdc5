"""The warning that a call is stuck: given once per call, long before it times out, with the error's text.

It goes to the logger ``asynccoll.stall``, and also to stderr unless the log goes there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping

from asynccoll.errors import InvalidArgumentError

#: The environment variable for the seconds after which to warn; 0 is never.
VARIABLE = "ASYNCCOLL_STALL_WARNING"
#: The default if it is not set. Simulated ranks get no warnings: their report says how each wait ended.
DEFAULT_SECONDS = 30.0
_log = logging.getLogger("asynccoll.stall")


def stall_seconds(given: float | None = None, environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds of waiting after which to warn, from ``given`` or the environment; 0.0 is never.

    Raises:
        InvalidArgumentError: the value is below 0, or is not a number.
    """
    said = environ.get(VARIABLE, "") if given is None else given
    try:
        seconds = float(said) if said != "" else DEFAULT_SECONDS
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        name = VARIABLE if given is None else "stall_warning"
        raise InvalidArgumentError(f"{name} must be a number of seconds, or 0 for never; got {said!r}")
    return seconds


def warn(rank: int, what: object, waited: float, why: object) -> None:
    """Warn that ``rank`` has waited for ``what`` for ``waited`` seconds, and ``why``."""
    text = f"rank {rank} has waited for {waited:.0f} s for {what}: {why}"
    say(_log, text)


def say(log: logging.Logger, text: str) -> None:
    """Log ``text`` as a warning to ``log``, and print it on stderr unless the log goes there."""
    log.warning(text)
    if log.hasHandlers() and not _goes_to_stderr(log):  # without handlers, logging itself writes to stderr
        with contextlib.suppress(OSError, ValueError):  # the reader of stderr is gone, or it is closed
            print(f"asynccoll: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the user reads it there


def _goes_to_stderr(log: logging.Logger) -> bool:
    logger: logging.Logger | None = log
    while logger is not None:
        if any(getattr(one, "stream", None) in (sys.stderr, sys.__stderr__) for one in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False

"""Loggers that print on rank 0 without any setup, as ignite's do."""

from __future__ import annotations

import logging
import sys

__all__ = ["setup_logger"]

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]  # subscriptable from 3.11 on
    """A handler that looks up ``sys.stderr`` for each record, since programs replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logger(name: str, rank: int) -> logging.Logger:
    """Return the logger ``name``, which writes to stderr unless it was set up; other ranks get a silent one.

    Theirs has a different name, since ranks that are threads share loggers. A logger counts as set up if the
    user has given it a level or a handler.
    """
    logger = logging.getLogger(name if rank == 0 else f"{name}.rank{rank}")
    if logger.handlers or logger.level:
        return logger
    logger.propagate = False
    if rank > 0:
        logger.addHandler(logging.NullHandler())
        return logger
    logger.setLevel(logging.INFO)
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    return logger

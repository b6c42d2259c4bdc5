"""Loggers that print on rank 0 without having been set up, as those of ignite do."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Handler = logging.StreamHandler[Any]
else:  # subscriptable from 3.11 on
    _Handler = logging.StreamHandler

__all__ = ["setup_logger"]

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class _ToStandardError(_Handler):
    """To standard error as it is when something is said; programs replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logger(name: str, rank: int) -> logging.Logger:
    """The logger called ``name``, to standard error unless it was set up; a silent one on other ranks.

    Those have another name: where ranks are threads, loggers are shared. A level or a handler of the user's
    sets it up.
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

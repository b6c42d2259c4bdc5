"""Loggers that print on rank 0 without having been set up, as those of ignite do."""

from __future__ import annotations

import logging

__all__ = ["setup_logger"]

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


def setup_logger(name: str, rank: int) -> logging.Logger:
    """The logger called ``name``: to standard error on rank 0 (unless it was set up), silent elsewhere."""
    existing = name in logging.root.manager.loggerDict
    logger = logging.getLogger(name)
    if rank > 0:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    elif not existing or not logger.handlers:
        logger.setLevel(logging.INFO)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    return logger

"""Horovod as this process has it: imported when asked for, initialised once, and kept.

Horovod is initialised by whoever comes first, the user or us, and stays so until the process ends: its
ranks find each other anew only in an elastic job. Which rank is where is asked of it, never of the
environment, whose variables an elastic job leaves stale.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from asynccoll.errors import BackendNotFoundError, LaunchEnvironmentError
from asynccoll.launch.info import LaunchInfo

__all__ = ["INSTALL", "load", "present", "start"]

#: A plain ``pip install horovod`` does not compile against today's torch.
INSTALL = (
    "Horovod 0.28.1, which the package index has as sources that need patches: `python "
    "tools/horovod_wheel.py --install` in a checkout of asynccoll builds it (docs/backends/horovod.md)"
)


def present() -> bool:
    """Whether Horovod is installed, with or without its part for torch."""
    return importlib.util.find_spec("horovod") is not None


def load() -> Any:
    """``horovod.torch``.

    Raises:
        BackendNotFoundError: it is not installed, or was built without torch or for another one.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise BackendNotFoundError(
            f"horovod.torch does not load: {error}. The backend needs {INSTALL}"
        ) from error
    return hvd


def start(hvd: Any, launch: LaunchInfo | None, comm: Any = None) -> None:
    """Initialise Horovod, unless the user did; ``comm`` is that of ``hvd.init``.

    Raises:
        LaunchEnvironmentError: a launcher that Horovod does not know has started several ranks.
    """
    if hvd.is_initialized():
        return
    if launch is not None and launch.launcher not in ("horovod", "serial") and launch.world_size > 1:
        raise LaunchEnvironmentError(
            f"this is rank {launch.rank} of {launch.world_size} that {launch.launcher} started, where "
            "Horovod would see a world of one; start the ranks with `asynccoll run --backend horovod` "
            "or horovodrun"
        )
    # Groups are process sets that are made while the job runs.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init(comm=comm)

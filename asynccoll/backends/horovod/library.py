"""Horovod in this process: imported when it is first used, initialized once, and kept.

Horovod is initialized once, by the user or by us, and stays so until the process ends; its ranks meet again
only in an elastic job. Ranks and places are read from Horovod, never from the environment, whose variables an
elastic job leaves stale.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from asynccoll.errors import BackendNotFoundError, CollectiveTimeoutError, LaunchEnvironmentError

if TYPE_CHECKING:
    from asynccoll.backends.api import LaunchInfo  # which loads torch

#: A plain ``pip install horovod`` does not compile against today's torch.
INSTALL = (
    "Horovod 0.28.1, which PyPI has only as sources, and these need patches: `python "
    "tools/horovod_wheel.py --install` in a checkout of asynccoll builds it (docs/backends/horovod.md)"
)


_LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_NEVER_SECONDS = 3650 * 86_400


def present() -> bool:
    """Whether Horovod is installed, with or without its part for torch."""
    return importlib.util.find_spec("horovod") is not None


def load() -> ModuleType:
    """Import and return ``horovod.torch``.

    Raises:
        BackendNotFoundError: Horovod is not installed, or was built without torch or for another torch.
    """
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise BackendNotFoundError(
            f"horovod.torch cannot be loaded: {error}. The backend needs {INSTALL}"
        ) from error


def start(hvd: ModuleType, launch: LaunchInfo | None, comm: object = None, seconds: float = 1800.0) -> None:
    """Initialize Horovod within ``seconds``, unless the user has; ``comm`` is passed to ``hvd.init``.

    Raises:
        CollectiveTimeoutError: the other ranks did not join.
        LaunchEnvironmentError: a launcher that Horovod does not know has started several ranks.
    """
    if hvd.is_initialized():
        return
    if launch is not None and launch.launcher not in ("horovod", "serial") and launch.world_size > 1:
        raise LaunchEnvironmentError(
            f"this is rank {launch.rank} of {launch.world_size} that {launch.launcher} started, but "
            "Horovod would see a world of one; start the ranks with `asynccoll run --backend horovod` "
            "or horovodrun"
        )
    # Groups are process sets that are made while the job runs.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    if os.environ.get("HOROVOD_ELASTIC") == "1":  # there, Horovod's own time limit starts the next round
        hvd.init(comm=comm)
        return
    # Horovod's time limit for other ranks' threads would fail all operations once a rank is stopped a while.
    os.environ.setdefault(_LIMIT, str(_NEVER_SECONDS))
    _init(hvd, comm, seconds)


def _init(hvd: ModuleType, comm: object, seconds: float) -> None:
    """Run ``hvd.init`` within ``seconds``: Horovod's own limit, which applies to it too, is switched off."""
    from asynccoll.backends.api import within  # which loads torch

    try:
        within(seconds, partial(hvd.init, comm=comm), "hvd.init()")
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"{error}: a rank has not called ac.initialize, or is not reachable"
        ) from error

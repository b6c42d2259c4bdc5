"""The horovodrun of this environment, and how it is told to start ranks on this host.

What runs in the ranks, and how their end is reported, is not known here.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from asynccoll.backends.horovod_library import INSTALL
from asynccoll.errors import BackendNotFoundError

__all__ = ["command", "find"]


def find() -> str:
    """The path of the program.

    Raises:
        BackendNotFoundError: there is none.
    """
    beside_python = Path(sysconfig.get_path("scripts"), "horovodrun")
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which("horovodrun")
    if found is None:
        raise BackendNotFoundError(
            f"there is no horovodrun in this Python environment or on the path; it comes with {INSTALL}"
        )
    return found


def command(ranks: int, program: Sequence[str]) -> list[str]:
    """The command line that starts ``ranks`` ranks of ``program`` on this host, with gloo as controller."""
    return [find(), "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", *program]

"""The horovodrun of this environment, and how it is told to start ranks on this host.

This module does not know what runs in the ranks, nor how their end is reported.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asynccoll.backends.horovod.library import INSTALL
from asynccoll.errors import BackendNotFoundError
from asynccoll.launch import horovodrun_quiet


@dataclass(frozen=True, slots=True)
class Horovodrun:
    """The program, and how it is started so that it ends without its own traceback."""

    path: str
    start: tuple[str, ...]

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """Return the command line that starts ``ranks`` ranks of ``program`` on this host."""
        return [*self.start, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", *program]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return ``environ`` as this launcher needs it."""
        return dict(environ)


def find() -> Horovodrun:
    """Return the horovodrun of this environment, else the first on the path.

    Raises:
        BackendNotFoundError: there is none.
    """
    beside_python = Path(sysconfig.get_path("scripts"), "horovodrun")
    if os.access(beside_python, os.X_OK):
        return Horovodrun(str(beside_python), (sys.executable, horovodrun_quiet.__file__))
    found = shutil.which("horovodrun")
    if found is None:
        raise BackendNotFoundError(
            f"there is no horovodrun in this Python environment or on the path; it comes with {INSTALL}"
        )
    return Horovodrun(found, (found,))  # belongs to another Python

"""What a launcher tells its ranks besides their places: the job's directory and the job's secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from asynccoll.flight import registry
from asynccoll.health.accounts import SECRET_VARIABLE

__all__ = ["naming"]


def naming(directory: str | Path, *, alone: bool = True) -> dict[str, str]:
    """Return the variables. A secret that the user has set is kept: ranks of several hosts must share it.

    ``alone``: no other launcher starts ranks of the job; another one would not know a secret made here.
    """
    secret = os.environ.get(SECRET_VARIABLE) or (secrets.token_hex(16) if alone else "")
    return {registry.VARIABLE: str(directory), SECRET_VARIABLE: secret}

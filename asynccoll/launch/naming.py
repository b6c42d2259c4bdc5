"""What a launcher tells its ranks beside their places: where they are to be found, and the job's secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from asynccoll.flight import registry
from asynccoll.health.accounts import SECRET_VARIABLE

__all__ = ["naming"]


def naming(directory: str | Path, *, alone: bool = True) -> dict[str, str]:
    """The variables. A secret that the user has chosen stays: ranks of several hosts must have the same.

    ``alone``: no other launcher starts ranks of the job. One that does would not know a secret of ours.
    """
    secret = os.environ.get(SECRET_VARIABLE) or (secrets.token_hex(16) if alone else "")
    return {registry.VARIABLE: str(directory), SECRET_VARIABLE: secret}

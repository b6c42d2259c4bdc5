"""What a launcher tells its ranks beside their places: where they are to be found, and the job's secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from asynccoll.flight import registry
from asynccoll.health.accounts import SECRET_VARIABLE

__all__ = ["naming"]


def naming(directory: str | Path) -> dict[str, str]:
    """The variables. A secret that the user has chosen stays: ranks of several hosts must have the same."""
    secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    return {registry.VARIABLE: str(directory), SECRET_VARIABLE: secret}

"""What every launcher settles about its ranks: how many there are, and what their environment says."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from asynccoll.environment.detection import PLACE
from asynccoll.errors import InvalidArgumentError
from asynccoll.flight import registry
from asynccoll.health.accounts import SECRET_VARIABLE

#: What the libraries themselves read, in addition to what we read.
_OF_LIBRARIES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "PRTE_", "HOROVOD_GLOO_RENDEZVOUS_", "TORCHELASTIC_")


def number_of_ranks(text: object) -> int:
    """Return the number of ranks on this host from a number, ``auto``, ``cpu`` or ``gpu``, as torchrun does.

    Raises:
        InvalidArgumentError: it is not a number, or less than one rank.
    """
    from torch.distributed.run import determine_local_world_size

    try:
        count: int = determine_local_world_size(str(text))
    except ValueError as error:
        raise InvalidArgumentError(f"-n {text}: {error}") from error
    if count < 1:
        raise InvalidArgumentError(f"-n {text}: expected at least one rank")
    return count


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what any launcher has said about this process's place: ranks get theirs."""
    return {k: v for k, v in environ.items() if k not in PLACE and not k.startswith(_OF_LIBRARIES)}


def naming(directory: str | Path, *, alone: bool = True) -> dict[str, str]:
    """Return the variables that name the job to its ranks: its directory, and its secret.

    A secret that the user has set is kept: ranks of several hosts must share it. ``alone``: no other launcher
    starts ranks of the job; another one would not know a secret made here.
    """
    secret = os.environ.get(SECRET_VARIABLE) or (secrets.token_hex(16) if alone else "")
    return {registry.VARIABLE: str(directory), SECRET_VARIABLE: secret}

"""The environment variables of torch, as ``ignite.distributed.initialize`` sets and ``finalize`` restores.

``asynccoll.launch`` finds out which launcher started this process; here are only ignite's rules for which
variables may be set together, with its errors, and the values that a program finds afterwards.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from asynccoll.environment.info import Variables
from asynccoll.environment.slurm import expand_with_scontrol
from asynccoll.errors import LaunchEnvironmentError
from asynccoll.launch import detect

__all__ = ["Environment"]

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_ALL = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
)


class EnvironmentRefusedError(LaunchEnvironmentError, RuntimeError):
    """Refused variables; a ``RuntimeError`` as well, which ignite raises for incomplete ones."""


class Environment:
    """The variables of torch, set on ``apply`` and put back on ``restore``."""

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        """Read and check what is set; ``rank`` and ``world_size`` fill in what no launcher says."""
        given = {name: value for name, value in os.environ.items() if value}  # empty ones are not set
        self.in_slurm: bool = "SLURM_JOB_ID" in given
        if self.in_slurm:
            if rank is not None or world_size is not None:
                raise LaunchEnvironmentError(
                    "Arguments rank and world_size should not be specified with SLURM"
                )
            self.values: dict[str, str] = _from_slurm(given)
        else:
            self.values = _from_torch(given, rank, world_size)
        #: whether a launcher has said how many ranks this node has
        self.complete: bool = self.in_slurm or "LOCAL_WORLD_SIZE" in given
        #: whether the local rank is set, but not the number of ranks
        self.partial: bool = not self.complete and "LOCAL_RANK" in given
        self._before: dict[str, str | None] = {}

    @property
    def rank(self) -> int:
        return Variables(self.values).integer("RANK")

    @property
    def world_size(self) -> int:
        return Variables(self.values).integer("WORLD_SIZE")

    def apply(self, *names: str) -> None:
        """Set these variables (all of them, if none is named)."""
        for name in names or _ALL:
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = self.values[name]

    def restore(self) -> None:
        """Put back what was there before."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()


def _from_torch(environ: Mapping[str, str], rank: int | None, world_size: int | None) -> dict[str, str]:
    given = [name in environ for name in _PLACE]
    if any(given) and not all(given):
        raise EnvironmentRefusedError(
            f"PyTorch distributed configuration should define env variables '{list(_PLACE)}'"
        )
    return {
        "RANK": environ.get("RANK", str(rank if rank is not None else 0)),
        "WORLD_SIZE": environ.get("WORLD_SIZE", str(world_size if world_size is not None else 1)),
        "LOCAL_RANK": environ.get("LOCAL_RANK", "0"),
        "MASTER_PORT": environ.get("MASTER_PORT", "15000"),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
    }


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    for name in _SLURM:
        if name not in environ:
            raise EnvironmentRefusedError(
                f"SLURM distributed configuration is missing '{name}' in env variables"
            )
    given = {name: environ.get(name) for name in _ALL}
    if None not in given.values():
        _check_beside_slurm(environ, given)
        return {name: environ[name] for name in _ALL}
    if any(value is not None for value in given.values()):
        warnings.warn(
            "We detected the following env variables: "
            f"{[(name, value) for name, value in given.items() if value is not None]},\n"
            "but will not take them into account as the following env vars are missing:"
            f"{[name for name, value in given.items() if value is None]},\n",
            stacklevel=4,
        )
    alone = {name: value for name, value in environ.items() if name not in _ALL}
    info = detect(alone, expand_hosts=expand_with_scontrol)
    if info.master_addr is None:
        raise EnvironmentRefusedError(
            "No hostname detected in SLURM_JOB_NODELIST by asynccoll "
            f"(nodelist={environ['SLURM_JOB_NODELIST']})"
        )
    values = (info.rank, info.local_rank, info.world_size, info.master_addr, info.master_port)
    return {name: str(value) for name, value in zip(_ALL, values, strict=True)}


def _check_beside_slurm(environ: Mapping[str, str], given: Mapping[str, str | None]) -> None:
    """Refuse torch's variables unless they match SLURM's; on one node they may ask for more."""
    number = Variables(environ).integer
    slurm = {
        "RANK": number("SLURM_PROCID"),
        "LOCAL_RANK": number("SLURM_LOCALID"),
        "WORLD_SIZE": number("SLURM_NTASKS"),
        "MASTER_ADDR": None,
        "MASTER_PORT": None,
    }
    several = number("SLURM_JOB_NUM_NODES") > 1
    for name in _PLACE:
        theirs, ours = int(slurm[name] or 0), number(name)
        if ours == theirs or (not several and ours > theirs):
            slurm[name] = ours
            continue
        wrong = (
            f"equivalent SLURM env variable. {name}: {ours} vs {theirs}\n"
            if several
            else f"equivalent SLURM env variable. We expect that {name}: {ours} >= {theirs}\n"
        )
        raise EnvironmentRefusedError(
            "Environment variable defined for PyTorch Distributed context is inconsistent with "
            f"{wrong}SLURM vars: {slurm}\nPTH vars: {dict(given)}\n"
        )

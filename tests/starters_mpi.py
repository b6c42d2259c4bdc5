"""Ranks under the mpiexec of this environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import guarded
from asynccoll.launch import mpiexec
from patience import patient

if TYPE_CHECKING:
    from worlds import World

#: Open MPI also watches its connection to the rank itself.
_KEEP = {"mpich": [], "openmpi": ["--enable-recovery"]}


def start(world: World, address: str) -> list[Any]:
    """All ranks by one mpiexec."""
    from worlds import rank_environment

    found = mpiexec.find()

    def launch(program: list[str]) -> list[str]:
        line = found.command(world.size, program)
        line[1:1] = _KEEP[found.family]
        return line

    return guarded.start(world, address, launch, found.environment(rank_environment()))


def options() -> dict[str, Any]:
    """What `initialize` is told: mpiexec has said the rest."""
    return {"timeout": patient(60)}

"""Ranks under the mpiexec of this environment."""

from __future__ import annotations

from collections.abc import Sequence
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

    environ = found.environment(rank_environment())
    return guarded.start(world, address, launch, environ | on_nodes(world.options.get("nodes", ())))


def on_nodes(nodes: Sequence[int]) -> dict[str, str]:
    """What has MPICH take ranks of this host for those of several, and not share memory between these."""
    several = len(set(nodes))
    if several < 2:
        return {}
    assert list(nodes) == [rank % several for rank in range(len(nodes))], "it deals them out in turn"
    return {"MPIR_CVAR_NUM_CLIQUES": str(several)}


def options() -> dict[str, Any]:
    """What `initialize` is told: mpiexec has said the rest."""
    return {"timeout": patient(60)}

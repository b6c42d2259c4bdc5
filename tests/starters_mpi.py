"""Ranks under the mpiexec of this environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import guarded
from asynccoll.launch import mpiexec
from patience import patient

if TYPE_CHECKING:
    from worlds import World

#: Open MPI also monitors its own connection to the rank.
_KEEP = {"mpich": [], "openmpi": ["--enable-recovery"]}


def start(world: World, address: str) -> list[Any]:
    """Start all ranks by one mpiexec."""
    from worlds import rank_environment

    found = mpiexec.find()

    def launch(program: list[str]) -> list[str]:
        line = found.command(world.size, program)
        line[1:1] = _KEEP[found.family]
        return line

    environ = found.environment(rank_environment())
    return guarded.start(world, address, launch, environ | on_nodes(world.options.get("nodes", ())))


def on_nodes(nodes: Sequence[int]) -> dict[str, str]:
    """Return variables that make MPICH treat the ranks as on several hosts, without memory between them."""
    several = len(set(nodes))
    if several < 2:
        return {}
    assert list(nodes) == [rank % several for rank in range(len(nodes))], "it deals them out in turn"
    return {"MPIR_CVAR_NUM_CLIQUES": str(several)}


def options() -> dict[str, Any]:
    """Return the options of `initialize`; mpiexec provides the rest."""
    return {"timeout": patient(60)}

"""Ranks under horovodrun, with Horovod's own gloo as controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import guarded
from asynccoll.launch import horovodrun

if TYPE_CHECKING:
    from worlds import World


def start(world: World, address: str) -> list[Any]:
    """All ranks by one horovodrun on this host."""
    from worlds import rank_environment

    def launch(program: list[str]) -> list[str]:
        return horovodrun.find().command(world.size, program)

    return guarded.start(world, address, launch, rank_environment())


def options() -> dict[str, Any]:
    """What `initialize` is told: horovodrun has said the rest."""
    return {"timeout": 60.0}


def lacks(name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """What Horovod cannot do: messages between two ranks."""
    return name in ("send", "recv")

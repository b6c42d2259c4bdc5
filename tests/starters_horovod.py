"""Ranks under horovodrun, with Horovod's own gloo as controller; or started by `horovod.run`, if so told."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import guarded
from asynccoll.launch import child, horovodrun
from patience import patient

if TYPE_CHECKING:
    from worlds import World


#: `horovod.run` of a function that runs the rank's program, as `horovodrun` does.
_RUN = """
import horovod, subprocess, sys

def rank(line):
    subprocess.run(line, check=True)

if __name__ == "__main__":
    horovod.run(rank, (sys.argv[2:],), num_proc=int(sys.argv[1]), use_gloo=True)
"""


#: Ranks that stand still while other worlds are in use must not take each other for dead.
_ENVIRONMENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "900"}


def start(world: World, address: str) -> list[Any]:
    """All ranks by one launcher, which dies with the test session, and so ends ranks that stand still."""
    from worlds import rank_environment

    def launch(program: list[str]) -> list[str]:
        if os.environ.get("ASYNCCOLL_TEST_HOROVOD_START") == "horovod.run":
            line = [sys.executable, "-c", _RUN, str(world.size), *program]
        else:
            line = horovodrun.find().command(world.size, program)
        return [sys.executable, child.__file__, "program", *line]

    return guarded.start(world, address, launch, _ENVIRONMENT | rank_environment())


def options() -> dict[str, Any]:
    """What `initialize` is told: horovodrun has said the rest."""
    return {"timeout": patient(60)}


def lacks(name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """What Horovod cannot do: messages between two ranks."""
    return name in ("send", "recv", "send_object", "recv_object")

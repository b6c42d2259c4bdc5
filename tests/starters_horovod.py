"""Ranks under horovodrun, with Horovod's own gloo as controller, or started by `horovod.run` on request."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import guarded
from asynccoll.launch import child, horovodrun
from patience import patient

if TYPE_CHECKING:
    from worlds import World


#: Calls `horovod.run` with a function that runs the rank's program, as `horovodrun` does.
_RUN = """
import horovod, subprocess, sys

def rank(line):
    subprocess.run(line, check=True)

if __name__ == "__main__":
    horovod.run(rank, (sys.argv[2:],), num_proc=int(sys.argv[1]), use_gloo=True)
"""


#: Ranks that are stopped while other worlds are in use must not consider each other dead.
_ENVIRONMENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "900"}


def start(world: World, address: str) -> list[Any]:
    """Start all ranks by one launcher, which dies with the test session, and so ends stopped ranks."""
    from worlds import rank_environment

    def launch(program: list[str]) -> list[str]:
        if os.environ.get("ASYNCCOLL_TEST_HOROVOD_START") == "horovod.run":
            line = [sys.executable, "-c", _RUN, str(world.size), *program]
        else:
            line = horovodrun.find().command(world.size, program)
        return [sys.executable, child.__file__, "program", *line]

    return guarded.start(world, address, launch, _ENVIRONMENT | rank_environment())


def options() -> dict[str, Any]:
    """Return the options of `initialize`; horovodrun provides the rest."""
    return {"timeout": patient(60)}


def lacks(name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Whether Horovod lacks the operation: it has no point-to-point messages."""
    return name in ("send", "recv", "send_object", "recv_object")

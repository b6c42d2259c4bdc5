"""Runs a `compositions.Program` on a world, and reports one that fails."""

from __future__ import annotations

import ranks
import worlds
from compositions import Program
from compositions_reduced import reduced
from compositions_run import HANG_SECONDS, run

#: The kinds of complaints after which the ranks are still in step.
_IN_STEP = {"value", "changed", "gradient", "scope", "input", "out", "twice", "modes", "strides"}


def has_messages(backend: str) -> bool:
    """Whether the backend has point-to-point messages."""
    lacks = ranks.GAPS.get(backend)
    return lacks is None or not lacks("send", (), {})


def complaints(program: Program, backend: str) -> list[str]:
    """Return the complaints of all ranks; a world whose ranks may be out of step is replaced."""
    world = worlds.world(backend, program.ranks)
    try:
        told = world.run(run, program.to_json(), timeout=2 * HANG_SECONDS)
    except worlds.RankError as error:
        found = [f"[hang] {error}"]
    else:
        found = [one for each in told for one in each]
    if not kinds(found) <= _IN_STEP:
        world.kill()
    return found


def kinds(found: list[str]) -> set[str]:
    """Return the kinds of these complaints."""
    return {one[1 : one.index("]")] for one in found}


def report(program: Program, found: list[str], backend: str, seconds: float) -> str:
    """Return a script of the smallest program with one of these faults, and its complaints."""
    wanted = kinds(found)
    last = found

    def fails(candidate: Program) -> bool:
        nonlocal last
        now = complaints(candidate, backend)
        if wanted.isdisjoint(kinds(now)):
            return False
        last = now
        return True

    small = reduced(program, fails, seconds)
    return "\n".join([small.script(), *last[:6]])

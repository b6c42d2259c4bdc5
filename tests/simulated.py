"""Runs a `compositions.Program` in a simulated world, every interleaving from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import compositions_run
from asynccoll.testing import Report, simulate
from compositions import Program


class SimulatedRank:
    """As much of `ranks.Rank` as a program needs; `signs` are those of all ranks."""

    def __init__(self, rank: int, size: int, signs: set[str]) -> None:
        self.rank = rank
        self.size = size
        self._signs = signs

    def show(self, sign: str) -> None:
        self._signs.add(sign)

    def shown(self, sign: str) -> bool:
        return sign in self._signs

    def prepare(self, *groups: Sequence[int]) -> bool:
        return True


def complaints(program: Program, seed: int, **options: Any) -> tuple[list[str], Report]:
    """What is wrong, by all ranks, and what became of the simulation."""
    signs: set[str] = set()

    async def main(rank: int) -> list[str]:
        me: Any = SimulatedRank(rank, program.ranks, signs)
        return await compositions_run.Run(me, program).whole()

    report = simulate(main, world_size=program.ranks, seed=seed, loop=program.loop, **options)
    found = [one for each in report.results.values() for one in each]
    found += [f"[crash] rank {rank}: {error!r}" for rank, error in report.errors.items()]
    if report.deadlock is not None:
        found.append(f"[hang] {report.deadlock}")
    found += [f"[mismatch] {one}" for one in report.mismatches]
    return found, report


def script(program: Program, seed: int) -> str:
    """A script that replays it, with ``tests`` on PYTHONPATH."""
    return (
        "from compositions import from_json\nfrom explore_simulated import wrong\n\n"
        f"print(*wrong(from_json('''{program.to_json()}'''), {seed}), sep='\\n')\n"
    )

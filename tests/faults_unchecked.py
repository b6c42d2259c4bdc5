"""Outcomes of differing calls that are not compared: on gloo, without shared memory and `check="full"`.

Run as a program, it tries each in fresh processes, and prints the table of docs/faults.md.
"""

from __future__ import annotations

from typing import Any

import torch

import worlds
from faults_matrix import CULPRIT, DIFFERENT, OPERATIONS, call, hear
from ranks import Rank


async def differs(me: Rank, operation: str, what: str) -> tuple[str, bool]:
    """Return the error, and whether the result is that of ranks that all make the same call."""
    expected = await me.get(call(me, operation))
    if me.rank == CULPRIT:
        does, _ = DIFFERENT[what]
        return (await does(me, operation))[0], True
    kept: list[Any] = []

    def begun() -> Any:
        kept.append(call(me, operation))
        return kept[0]

    error = (await hear(me, begun))[0]
    return error, error != "" or _same(kept[0].result(), expected)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return all(map(_same, one, other))
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def outcome(operation: str, what: str, size: int) -> str:
    """Return the outcome over all ranks, in words."""
    with worlds.fresh("gloo", size, memory=False) as world:
        try:
            results = world.run(differs, operation, what, dies=range(size), timeout=8)
        except worlds.RankError as error:
            return "hangs" if "hang" in str(error) else "an error of another kind"
        finally:
            world.kill()
    died = sorted({-one.code for one in results if isinstance(one, worlds.Died)})
    if died:
        return f"a process is ended by signal {died[0]}"
    errors = sorted({error for error, _ in results if error})
    if errors:
        return ", ".join(f"`{error}`" for error in errors)
    return "no error" if all(same for _, same in results) else "**wrong numbers**"


if __name__ == "__main__":
    print("| operation | differs in | 2 ranks | 3 ranks |\n|---|---|---|---|")
    for name, (_, words) in OPERATIONS.items():
        for what, (_, word) in DIFFERENT.items():
            if not word or word in words.split():
                print(
                    f"| {name} | {what} | {outcome(name, what, 2)} | {outcome(name, what, 3)} |", flush=True
                )

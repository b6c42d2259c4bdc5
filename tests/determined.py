"""Checks that the same seed gives the same simulation: drawn programs, with faults, in two processes.

``python tests/determined.py COUNT [SEED]`` runs the two processes concurrently, with different hash seeds, so
each is also load for the other. It fails at the first program whose digests differ. With
``--digests COUNT SEED`` it is one of the two processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import asynccoll as ac
from compositions import Program
from explore_simulated import Order, drawn, is_carried

__all__ = ["differing", "digests"]

HASH_SEEDS = ("1", "4711")
SIZES = (2, 3, 2, 3, 5)
_TOLD_EVERY = 500


def digests(count: int, first: int) -> Iterator[str]:
    """Yield the digest and the order of each of ``count`` programs, drawn from this seed on."""
    warnings.simplefilter("ignore", ac.UnawaitedWorkWarning)
    for number, program in enumerate(islice(_programs(first), count)):
        order = Order(number, program)
        _, report = order.run()
        yield f"{number} {order.transport} {program.loop} {order.faults} {report.digest}"


def _programs(seed: int) -> Iterator[Program]:
    number = 0
    while True:
        for size in SIZES:
            for program in drawn(size, seed):
                if is_carried(program, Order(number, program).transport):
                    number += 1
                    yield program
            seed += 1


def differing(count: int, first: int) -> tuple[int, list[str]]:
    """Return how many digests were compared, and the two lines of the first program that differs."""
    here = Path(__file__)
    search = os.pathsep.join([str(Path(ac.__file__).parent.parent), str(here.parent)])
    command = [sys.executable, str(here), "--digests", str(count), str(first)]
    running = [
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in HASH_SEEDS
    ]
    compared, begun = 0, time.monotonic()
    try:
        assert running[0].stdout is not None
        assert running[1].stdout is not None
        for one, other in zip(running[0].stdout, running[1].stdout, strict=False):
            if one != other:
                return compared, [one, other]
            compared += 1
            if compared % _TOLD_EVERY == 0:
                print(f"{compared} of {count} the same, {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        for each in running:
            each.kill()
            each.communicate()
    return compared, []


def main() -> int:
    """Compare two processes, or be one of them."""
    if sys.argv[1] == "--digests":
        for line in digests(int(sys.argv[2]), int(sys.argv[3])):
            print(line, flush=True)
        return 0
    count, first = int(sys.argv[1]), int((*sys.argv[2:], "1")[0])
    compared, different = differing(count, first)
    print(f"{compared} of {count} programs: the same digest in two processes", *different, sep="\n")
    return 0 if compared == count else 1


if __name__ == "__main__":
    sys.exit(main())

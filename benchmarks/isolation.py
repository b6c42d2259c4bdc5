"""The cost per suspension of keeping torch's modes private to a task (``ac.isolated``).

    python benchmarks/isolation.py

A coroutine that suspends repeatedly is driven by hand, as an event loop would drive it, bare and isolated.
The benchmark prints the difference in microseconds of this thread's processor time, for each mode that the
coroutine may be in. Figures are the best of many repeats.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from time import thread_time
from typing import Any

import torch

import asynccoll as ac

SUSPENSIONS = 500
REPEATS = 100


@contextlib.contextmanager
def evaluating() -> Generator[None, None, None]:
    with torch.no_grad(), torch.autocast("cpu"):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch's defaults": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "no_grad and autocast": evaluating,
    "a default device": lambda: torch.device("cpu"),
}


class Suspension:
    """An awaitable that suspends once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def suspended(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Suspend repeatedly in a block of ``mode``."""
    with mode():
        for _ in range(SUSPENSIONS):
            await Suspension()


def cost(make: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Return the microseconds of one suspension."""
    best = float("inf")
    for _ in range(REPEATS):
        coroutine = make()
        start = thread_time()
        with contextlib.suppress(StopIteration):
            while True:
                coroutine.send(None)
        best = min(best, thread_time() - start)
    return best / SUSPENSIONS * 1e6


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, mode in MODES.items():
        bare = cost(lambda mode=mode: suspended(mode))  # type: ignore[misc]  # bound in the loop
        isolated = cost(lambda mode=mode: ac.isolated(suspended(mode)))  # type: ignore[misc]  # as above
        print(f"{name:<24} {isolated - bare:5.1f} us")


if __name__ == "__main__":
    main()

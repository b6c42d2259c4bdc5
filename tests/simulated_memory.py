"""Calls through shared memory between simulated ranks of one host, and their expected results."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.testing import PCT, RandomWalk, Report, simulate
from asynccoll.testing.scheduler import running

ENGINE = tuple(
    f"asynccoll.backends.memory.{name}" for name in ("moving", "engine", "exchanges", "pair", "messages")
)


def run(main: Callable[[int], Any], seed: int, **options: Any) -> Report:
    """Simulate ``main`` in memory, in the order of this seed."""
    schedule = PCT() if seed % 2 else RandomWalk()
    given = {"transport": "memory", "schedule": schedule, "real_seconds": 60.0} | options
    return simulate(main, seed=seed, **given)


def expected(call: tuple[str, int], number: int, rank: int, size: int) -> list[float]:
    """Return the expected result of call ``number`` on a rank."""
    name, count = call
    rows = [[float(100 * number + 10 * one + place % 7) for place in range(count)] for one in range(size)]
    if name == "all_reduce":
        return [sum(column) for column in zip(*rows, strict=True)]
    if name == "broadcast":
        return rows[number % size]
    return [value for row in rows for value in row]


def started(call: tuple[str, int], number: int, rank: int) -> Any:
    """Make the call, and return its work."""
    name, count = call
    x = torch.tensor([float(100 * number + 10 * rank + place % 7) for place in range(count)])
    if name == "all_reduce":
        return ac.all_reduce(x)
    if name == "broadcast":
        return ac.broadcast(x, src=number % ac.get_world_size())
    return ac.all_gather(x)


def drawn(seed: int, most: int = 12) -> list[tuple[str, int]]:
    """Draw calls of one step and of many."""
    chance = random.Random(seed)
    names = ("all_reduce", "broadcast", "all_gather")
    counts = (0, 1, 3, 16, 40, 200)
    return [(chance.choice(names), chance.choice(counts)) for _ in range(chance.randint(1, most))]


def flat(value: torch.Tensor) -> list[float]:
    """Return the elements of a tensor."""
    return [float(one) for one in value.reshape(-1)]


def told(work: Any, tries: int = 1) -> list[float]:
    """Wait for the result, again after an interrupt, and flatten it."""
    for _ in range(tries):
        try:
            value = work.wait()
        except KeyboardInterrupt:
            continue
        return flat(value)
    raise AssertionError("it was interrupted too often")


@contextmanager
def interrupted(after: float) -> Iterator[list[bool]]:
    """A block in which Ctrl-C strikes this simulated thread, ``after`` seconds if it is not over by then.

    Yields a list that has an element once it has struck.
    """
    scheduler = running()
    assert scheduler is not None
    me = scheduler.current
    assert me is not None
    struck: list[bool] = []
    left: list[bool] = []

    def strike() -> None:
        host.sleep(after)
        if not left:
            struck.append(True)
            scheduler.interrupt(me, KeyboardInterrupt())

    host.Thread(target=strike).start()
    try:
        yield struck
    finally:
        left.append(True)


def check(calls: Sequence[tuple[str, int]], got: Sequence[list[float]], rank: int, size: int) -> None:
    """Check that all calls have their expected results."""
    for number, (call, values) in enumerate(zip(calls, got, strict=True)):
        wanted = expected(call, number, rank, size)
        assert values == wanted, f"rank {rank}, call {number}, {call}: {values} for {wanted}"

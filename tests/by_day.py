"""Selects the cases that ``make test`` runs; ``make nightly`` and plain pytest run all of them.

By day, to keep it well below an hour:

- worlds of one, three or four ranks wait only on asyncio, because the way of waiting does not depend on the
  number of ranks;
- gloo and memory run each test in two combinations of world size and way of waiting, the others in one; which
  ones differs from test to test. Only gloo and memory run with five ranks;
- tests that hardly depend on either run with two ranks on asyncio on all backends but gloo;
- tests that start whole jobs run a third of their cases, and simulations a third of their orders;
- tests marked ``nightly`` are left out: another test takes the same path through the library by day.

The selection depends only on the names of the cases.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest

__all__ = ["left_out", "orders"]

ONLY = os.environ.get("ASYNCCOLL_TEST_CASES", "all")
_WORLDS = {"world", "several", "four", "pair"}
_WAYS = {"runner", "loop"}
_DEPEND_LITTLE = {
    "test_coalescing", "test_composed", "test_empties", "test_finish_interrupts", "test_fusion",
    "test_prepare",
}  # fmt: skip
#: Their tests start jobs, in which every rank imports torch: that takes longer than all other tests.
_JOBS = {
    f"test_{name}"
    for name in (
        "cli", "cli_ends", "endings", "exit", "forks", "horovod_launch", "hosts", "launchers", "leaving",
        "meeting", "memory_containers", "mpi_launch", "notebook", "parallel", "ranks_fixture", "spawn",
        "sync_environment", "sync_launch", "xla_launch",
    )
}  # fmt: skip


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return those of ``items`` that only run by night."""
    if ONLY == "all":
        return set()
    assert ONLY == "day", f"ASYNCCOLL_TEST_CASES={ONLY}: expected all or day"
    out: set[pytest.Item] = set()
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        backend, size = _world(item)
        way = _value(item, _WAYS, "asyncio")
        if (
            item.get_closest_marker("nightly")
            or (size != 2 and way != "asyncio")
            or ("five_ranks" in item.nodeid and backend not in ("gloo", "memory"))
            or (backend != "gloo" and item.path.stem in _DEPEND_LITTLE and (size, way) != (2, "asyncio"))
        ):
            out.add(item)
        elif _starts_jobs(item):
            cases[item.nodeid.partition("[")[0]].append(item)
        elif size > 1:
            cases[_but_for_world_and_way(item)].append(item)
    for those in cases.values():
        out.update(those)
        out.difference_update(_some_of(those))
    return out


def _world(item: pytest.Item) -> tuple[str, int]:
    """Return the backend and the number of ranks: two if the case names no world."""
    match _value(item, _WORLDS, None):
        case (str(backend), int(size)):
            return backend, size
    return str(_value(item, {"backend"}, "gloo")), 2


def orders(count: int) -> range:
    """Return the seeds of a simulation that runs ``count`` orders by night, and a third of them by day."""
    return range(count if ONLY == "all" else -(-count // 3))


def _starts_jobs(item: pytest.Item) -> bool:
    """Whether the test itself starts ranks, rather than being given a world."""
    return item.path.stem in _JOBS and _value(item, _WORLDS, None) is None


def _some_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return two cases on gloo and on memory (which are always available), else one; a third of the jobs.

    Backends get different cases.
    """
    cases = sorted(cases, key=lambda case: case.nodeid)
    turn = crc32(cases[0].nodeid.encode()) % len(cases)
    backend, _ = _world(cases[0])
    count = -(-len(cases) // 3) if _starts_jobs(cases[0]) else 2 if backend in ("gloo", "memory") else 1
    return (cases[turn:] + cases[:turn])[:count]


def _but_for_world_and_way(item: pytest.Item) -> str:
    """Return the test's name and its other parameters."""
    values = _values(item)
    rest = {name: repr(value) for name, value in values.items() if name not in _WORLDS | _WAYS}
    return f"{item.nodeid.partition('[')[0]} {sorted(rest.items())}"


def _value(item: pytest.Item, fixtures: set[str], otherwise: Any) -> Any:
    """Return the value of whichever of ``fixtures`` this case uses."""
    return next((value for name, value in _values(item).items() if name in fixtures), otherwise)


def _values(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}

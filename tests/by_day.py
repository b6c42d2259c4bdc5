"""The cases that ``make test`` runs; ``make nightly`` runs all of them, and so does pytest by itself.

By day, so that it takes no hour:

- with one, three or four ranks one waits on asyncio: how one waits has nothing to do with their number;
- gloo does each thing in three numbers of ranks and ways to wait, memory in two, others in one, which differ
  from test to test; and nothing with five ranks, but for memory;
- what depends little on either has two ranks and asyncio on all backends but gloo;
- a test marked ``nightly`` is left out: another one of the day goes the same way through the library.

Which cases these are depends on nothing but their names.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest

__all__ = ["left_out"]

ONLY = os.environ.get("ASYNCCOLL_TEST_CASES", "all")
_WORLDS = {"world", "several", "four", "pair"}
_WAYS = {"runner", "loop"}
_DEPEND_LITTLE = {"test_coalescing", "test_composed", "test_empties", "test_fusion", "test_prepare"}


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those of ``items`` that wait for the night."""
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
        elif size > 1:
            cases[_but_for_world_and_way(item)].append(item)
    for those in cases.values():
        out.update(those)
        out.difference_update(_some_of(those))
    return out


def _world(item: pytest.Item) -> tuple[str, int]:
    """The backend and the number of ranks; two ranks where the case says nothing, or more than that."""
    match _value(item, _WORLDS, None):
        case (str(backend), int(size)):
            return backend, size
    return str(_value(item, {"backend"}, "gloo")), 2


def _some_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Three on gloo and two on memory, which are always there, else one: others than on another backend."""
    cases = sorted(cases, key=lambda case: case.nodeid)
    turn = crc32(cases[0].nodeid.encode()) % len(cases)
    backend, _ = _world(cases[0])
    return (cases[turn:] + cases[:turn])[: {"gloo": 3, "memory": 2}.get(backend, 1)]


def _but_for_world_and_way(item: pytest.Item) -> str:
    """What the test is called, and the other values that it is given."""
    values = _values(item)
    rest = {name: repr(value) for name, value in values.items() if name not in _WORLDS | _WAYS}
    return f"{item.nodeid.partition('[')[0]} {sorted(rest.items())}"


def _value(item: pytest.Item, fixtures: set[str], otherwise: Any) -> Any:
    """The value of the one of ``fixtures`` that this case has."""
    return next((value for name, value in _values(item).items() if name in fixtures), otherwise)


def _values(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}

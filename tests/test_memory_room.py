"""How much memory the lanes of a host take: bounded, and given back with them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import asynccoll as ac
import oracle
import worlds
from asynccoll.backends.memory.arena import Arena
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.layout import ABORTED, CLOSED, Layout
from asynccoll.backends.memory.region import Region
from patience import patient
from ranks import Rank
from worlds import World

#: What all lanes of a rank's arena may take, as docs/memory.md says.
MOST_BYTES = 1 << 30


@pytest.mark.parametrize("size", [2, 8, 64])
def test_32_lanes_stay_under_a_gibibyte(size: int) -> None:
    """Of so many ranks, all on one host; no two of them in the same place."""
    arena = Arena()
    try:
        lent = sorted(
            (offset, layout.total_bytes) for offset, layout in (arena.lend(size) for _ in range(32))
        )
        assert sum(length for _, length in lent) <= MOST_BYTES
        assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(lent))
    finally:
        arena.close()


async def many_lanes(me: Rank) -> list[int]:
    """Pages of shared memory that this process has, in KiB: at first, and after each turn."""
    x = torch.full((1 << 18,), float(me.rank + 1))  # two slots full
    found = [shared_kib()]
    names = [f"room {number}" for number in range(24)]
    for _ in range(2):
        for name in names * 4:  # all eight slots of each
            got = await me.get(ac.all_reduce(x, lane=name))
            oracle.same(got, torch.full_like(x, me.size * (me.size + 1) / 2))
        found.append(shared_kib())
    return found


def shared_kib() -> int:
    with open(f"/proc/{os.getpid()}/status") as status:  # not a file to speak of
        said: dict[str, Any] = dict(line.split(":", 1) for line in status)
    return int(said["RssShmem"].split()[0])


@pytest.fixture(scope="module")
def world() -> World:
    return worlds.world("memory", 4)


def test_many_lanes(world: World) -> None:
    """Only the pages that are used count, and using them once more takes no more."""
    for first, used, again in world.run(many_lanes, timeout=60):
        assert 0 < used - first < 24 * 34 << 10
        assert again - used < 1 << 10


#: A lane's memory that is garbage in the parent, not collected yet, when it forks.
FORKED = """
import gc, mmap, os
from asynccoll.backends.memory.arena import Arena, map_region
gc.disable()
arena = Arena()
offset, layout = arena.lend(2)
circle = [map_region(arena.descriptor, offset, layout.total_bytes)]
circle.append(circle)
del circle
child = os.fork()
if child == 0:
    own = [mmap.mmap(-1, 1 << 20) for _ in range(200)]
    for one in own:
        one[:8] = b"12345678"
    gc.collect()
    os._exit(any(one[:8] != b"12345678" for one in own))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
def test_a_child_keeps_what_it_maps_where_its_parent_has_a_lane() -> None:
    """The kernel gives it those addresses again, and collecting the parent's garbage would unmap them."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=patient(20), check=True
    )
    assert ended.stdout.split() == ["0"], ended.stderr


class NoBells:
    """Of a rank without others."""

    crowded = False

    def wake(self, index: int) -> None: ...

    def ring(self, index: int) -> None: ...


def test_who_has_left_writes_nothing_more() -> None:
    """A lane given up is closed later, when its memory may be another lane's."""
    layout = Layout(2, 4096)
    buffer = bytearray(layout.total_bytes)
    engine = Engine(Region(buffer, layout, 0), NoBells(), "a lane", [0, 1])
    engine.stop(ABORTED, ac.PeerLostError("given up"))
    assert any(buffer)
    buffer[:] = bytes(len(buffer))
    engine.stop(CLOSED, ac.AbortedError("closed"))
    assert not any(buffer)
